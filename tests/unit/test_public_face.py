"""What `import hashnet` offers, and what it does not drag in."""

import ast
import subprocess

import hashnet

HEAVY = ("torch", "faiss", "ray", "numba", "sklearn", "scipy", "matplotlib", "pandas", "yaml", "PIL")


def loaded_by(python, statement):
    code = f"import sys; {statement}; print([m for m in {HEAVY!r} if m in sys.modules])"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_hashnet_is_light(python):
    assert loaded_by(python, "import hashnet") == "[]"


def test_the_client_is_light(python):
    assert (
        loaded_by(python, "import hashnet; hashnet.Client; hashnet.AsyncClient; hashnet.SearchResult") == "[]"
    )


def test_all_is_sorted_and_every_name_loads():
    assert hashnet.__all__ == sorted(hashnet.__all__)
    for name in hashnet.__all__:
        assert getattr(hashnet, name) is not None


def test_layers_point_one_way(repo):
    upward = {"hashnet": ("ray", "cluster", "jobs"), "cluster": ("jobs",)}
    for layer, above in upward.items():
        for path in (repo / layer).rglob("*.py"):
            for line in path.read_text().splitlines():
                words = line.split()
                if len(words) > 1 and words[0] in ("import", "from"):
                    assert words[1].split(".")[0] not in above, f"{path} imports {words[1]}"


def test_only_the_index_imports_faiss(repo):
    users = {p for p in (repo / "hashnet").rglob("*.py") if "import faiss" in p.read_text()}
    assert all(p.is_relative_to(repo / "hashnet" / "index") for p in users)


def unit_of(module: str) -> str:
    """The package with one entry point that a module belongs to: hashnet.store.plan → hashnet.store."""
    return ".".join(module.split(".")[:2])


def test_packages_are_entered_by_their_front_door(repo):
    """Nothing outside a package imports its inner modules: what others need, its __init__ exports."""
    packages = {f"{p.parent.parent.name}.{p.parent.name}" for p in repo.glob("*/*/__init__.py")}
    for layer in ("hashnet", "cluster", "jobs"):
        for path in (repo / layer).rglob("*.py"):
            own = unit_of(path.relative_to(repo).with_suffix("").as_posix().replace("/", "."))
            for node in ast.walk(ast.parse(path.read_text())):
                names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
                names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                for name in names:
                    inner = name.count(".") > 1 and unit_of(name) in packages
                    assert not inner or unit_of(name) == own, f"{path.relative_to(repo)} imports {name}"
