"""``hashnet serve`` and ``python jobs/serve.py`` as a user starts them, their page in a browser, and Ctrl-C.

Pictures of what the browser showed are kept where HASHNET_SCREENSHOTS says, for people to look at.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hashnet import BinaryIndex
from hashnet.data.manifest import Manifest
from tests.support.local_cluster import free_ports
from tests.support.small_run import some_codes, with_features

pytestmark = pytest.mark.browser
DESKTOP = {"viewport": {"width": 1280, "height": 860}}
PHONE = {
    "viewport": {"width": 390, "height": 844},
    "device_scale_factor": 2,
    "is_mobile": True,
    "has_touch": True,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    return with_features(tmp_path_factory.mktemp("page") / "run")


@pytest.fixture(scope="module", params=["hashnet serve", "jobs/serve.py"])
def url(browser: Any, run: str, python: str, repo: Path, request: Any) -> Iterator[str]:
    """The server, started and stopped as from a terminal."""
    port = free_ports(1)[0]
    env = {name: value for name, value in os.environ.items() if not name.startswith("HASHNET_")}
    is_job = request.param == "jobs/serve.py"
    words = [python, "-m", "hashnet.cli", "serve", run, "--port", str(port)]
    if is_job:
        words = [python, "jobs/serve.py", f"run={run}", f"port={port}"]
    process = subprocess.Popen(
        words,
        cwd=repo,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's is ignored
    )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait(address, process)
        yield address
        process.send_signal(signal.SIGINT)
        out, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
        if is_job:
            assert json.loads(out.splitlines()[-1])["url"] == address
        assert f"{address}/" in said  # where to look,
        assert "hashnet query" in said  # and what to try
        assert "Traceback" not in said
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{address}/healthz")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the server's own group: Ray's processes with it
            process.wait()


def _wait(address: str, process: subprocess.Popen) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        if process.poll() is not None:
            pytest.fail(f"the server ended: {process.stderr.read() if process.stderr else ''}")
        try:
            if httpx.get(f"{address}/readyz", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.3)
    pytest.fail("the server did not come up within two minutes")


@pytest.fixture
def picture(run: str, tmp_path: Path) -> tuple[int, Path]:
    """An indexed digit as a file, and its id."""
    id_ = int(BinaryIndex.load(f"{run}/index").ids()[11])
    rows = Manifest.open(f"{run}/manifest.parquet").read(columns=["image"], start=id_, stop=id_ + 1)
    path = tmp_path / "digit.png"
    path.write_bytes(rows["image"][0].as_py())
    return id_, path


class Visit:
    """One page, and whether it asked anybody but the server or complained."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.url = url
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on(
            "console", lambda line: self.complaints.append(line.text) if line.type == "error" else None
        )

    def open(self, path: str = "/") -> Any:
        self.page.goto(self.url + path)
        self.page.wait_for_selector(".hit[data-id]")
        return self.page

    def keep(self, name: str) -> None:
        folder = os.environ.get("HASHNET_SCREENSHOTS")
        if folder:
            self.page.screenshot(path=f"{folder}/{name}.png")

    def end(self) -> None:
        elsewhere = [url for url in self.asked if not url.startswith((self.url, "blob:", "data:"))]
        assert elsewhere == []
        self.context.close()


@pytest.fixture
def visit(browser: Any, url: str) -> Iterator[Visit]:
    one = Visit(browser, url, **DESKTOP)
    yield one
    one.end()


def test_upload_results_and_click_through(visit: Visit, picture: tuple[int, Path], run: str) -> None:
    id_, path = picture
    index = BinaryIndex.load(f"{run}/index")
    page = visit.open()
    assert "400 items" in page.inner_text("#about")
    visit.keep("start")
    page.set_input_files("#file", str(path))
    page.wait_for_selector(".distance")
    expected = index.search(index.codes([id_]), k=12)
    shown = page.eval_on_selector_all(".hit", "cards => cards.map(card => Number(card.dataset.id))")
    assert shown == expected.ids[0].tolist()
    words = page.locator(".distance").all_inner_texts()
    assert [int(text.split()[0]) for text in words] == expected.distances[0].tolist()
    # the bits that differ are coloured, exactly as many as the distance says
    coloured = page.eval_on_selector_all(
        ".hit .bits svg", "drawings => drawings.map(one => one.querySelectorAll('.differ').length)"
    )
    assert coloured == expected.distances[0].tolist()
    assert page.locator("#score").is_hidden()  # nobody said what the picture shows
    page.select_option("#truth-label", "3")
    page.wait_for_selector("#score:not([hidden])")
    visit.keep("upload")
    # click through
    second = shown[1]
    page.locator(f".hit[data-id='{second}']").click()
    page.wait_for_url(f"**/#item={second}")
    page.wait_for_function(
        f"() => document.querySelector('#query-name').textContent.includes('{second:04d}.png')"
    )
    expected = index.search(index.codes([second]), k=12, exclude_self=[second])
    page.wait_for_function(f"() => document.querySelector('.hit')?.dataset.id === '{expected.ids[0][0]}'")
    labels = dict(zip(expected.ids[0].tolist(), index.labels(expected.ids[0]) or [], strict=True))
    (own,) = index.labels([second]) or [[]]
    right = sum(bool(set(labels[hit]) & set(own)) for hit in labels)
    assert f"{right} of 12" in page.inner_text("#score-name")
    assert page.inner_text("#score-value").startswith(str(round(right / 12 * 100)))
    visit.keep("item")
    page.go_back()
    page.wait_for_url("**/#picture")
    assert visit.complaints == []


def test_k_radius_and_filter(visit: Visit, run: str) -> None:
    index = BinaryIndex.load(f"{run}/index")
    id_ = int(index.ids()[3])
    page = visit.open(f"/#item={id_}")
    page.wait_for_selector(".distance")
    page.fill("#k", "5")
    page.wait_for_function("() => document.querySelectorAll('.hit[data-id]').length === 5")
    page.select_option("#filter", "7")
    page.wait_for_function(
        "() => [...document.querySelectorAll('.hit .chip')].every(chip => chip.textContent === '7')"
    )
    page.select_option("#filter", "")
    page.get_by_text("Within a radius").click()
    page.fill("#radius", "8")
    near = index.search_radius(index.codes([id_]), radius=8, exclude_self=[id_])[0]
    page.wait_for_function(f"() => document.querySelectorAll('.hit[data-id]').length === {len(near)}")
    page.wait_for_function("() => document.querySelector('#title').textContent.includes('within 8 bits')")
    assert visit.complaints == []


def test_an_item_by_its_id(visit: Visit, run: str) -> None:
    index = BinaryIndex.load(f"{run}/index")
    id_ = int(index.ids()[3])
    page = visit.open()
    assert page.locator("#ranking-row").is_visible()  # a picture can be ranked in two ways
    page.get_by_label("Item by id or key").fill(str(id_))
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/#item={id_}")
    page.wait_for_selector(".distance")
    expected = index.search(index.codes([id_]), k=12, exclude_self=[id_]).ids[0].tolist()
    ids = "cards => cards.map(card => Number(card.dataset.id))"
    assert page.eval_on_selector_all(".hit", ids) == expected
    assert page.locator("#ranking-row").is_hidden()  # an item only in one
    page.get_by_label("Item by id or key").fill("cat.jpg")
    page.keyboard.press("Enter")
    page.wait_for_selector("#error:not([hidden])")
    assert (
        page.inner_text("#error-text") == "The items of this index have no keys. Enter an id, a whole number."
    )


def test_a_run_with_keys_and_without_a_model(browser: Any, tmp_path: Path, python: str, repo: Path) -> None:
    codes, keys = some_codes(40), [f"größe {i}&x.jpg" for i in range(38)] + ["0", "-"]
    index = BinaryIndex.from_arrays(codes, keys=keys)
    index.save(str(tmp_path / "run/index"))
    port = free_ports(1)[0]
    words = [python, "-m", "hashnet.cli", "serve", str(tmp_path / "run"), "--port", str(port)]
    process = subprocess.Popen(words, cwd=repo, stderr=subprocess.PIPE, text=True)
    try:
        _wait(f"http://127.0.0.1:{port}", process)
        one = Visit(browser, f"http://127.0.0.1:{port}", **PHONE)
        one.page.goto(one.url)
        one.page.wait_for_selector("#lookup:not([hidden])")
        why = "This index has no model to encode pictures with: click an item, or enter an id or a key."
        assert one.page.inner_text("#nopictures") == why
        one.page.wait_for_function("() => document.querySelector('#title').textContent.includes('id or key')")
        one.keep("no-model")
        for typed, id_ in ((keys[7], 7), ("0", 38), ("5", 5)):  # a key first, then an id
            one.page.get_by_label("Item by id or key").fill(typed)
            one.page.keyboard.press("Enter")
            one.page.wait_for_url(f"**/#item={id_}")
            nearest = int(index.search(codes[[id_]], k=1, exclude_self=[id_]).ids[0, 0])
            one.page.wait_for_selector(f".hit[data-id='{nearest}']")
            assert one.page.inner_text("#query-name") == keys[id_]
        assert one.page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")
        one.page.get_by_label("Item by id or key").fill("none")
        one.page.keyboard.press("Enter")
        one.page.wait_for_selector("#error:not([hidden])")
        assert "holds no key 'none'" in one.page.inner_text("#error-text")
        one.end()
    finally:
        process.terminate()
        process.wait(30)


def test_rescoring_by_vectors(visit: Visit, picture: tuple[int, Path], run: str) -> None:
    """A choice where the index has vectors, for items and pictures alike, and none where it has not."""
    index = BinaryIndex.load(f"{run}/index")
    id_, path = picture
    code, vector = index.codes([id_]), index.features([id_])
    expected = index.search(code, 12, rescore="features", features=vector, exclude_self=[id_])
    assert expected.ids.tolist() != index.search(code, 12, exclude_self=[id_]).ids.tolist()
    page = visit.open(f"/#item={id_}")
    page.wait_for_selector(".distance")
    page.get_by_label("Rescore by vectors").check()
    page.wait_for_function(
        "() => document.querySelector('#title').textContent.includes('rescored by vectors')"
    )
    ids = "cards => cards.map(card => Number(card.dataset.id))"
    assert page.eval_on_selector_all(".hit", ids) == expected.ids[0].tolist()
    shown = [text.split(" · ")[1] for text in page.locator(".distance").all_inner_texts()]
    assert shown == [f"{score:.2f}" for score in expected.scores[0]]  # type: ignore[index]
    visit.keep("rescored")
    page.set_input_files("#file", str(path))
    page.wait_for_function(f"() => document.querySelector('.hit')?.dataset.id === '{id_}'")
    assert page.locator(".distance").first.inner_text() == "0 bits · 1.00"
    page.get_by_text("Within a radius").click()
    page.wait_for_selector("#rescore-row", state="hidden")
    page.wait_for_function("() => document.querySelector('#title').textContent.includes('within')")
    assert visit.complaints == []

    def without_vectors(route: Any) -> None:
        route.fulfill(json=route.fetch().json() | {"n_vector": None})

    page.route("**/v1/info", without_vectors)
    page.goto("about:blank")
    visit.open(f"/#item={id_}")
    page.wait_for_selector(".distance")
    assert page.locator("#rescore-row").is_hidden()


def test_the_error_state_and_the_way_out(visit: Visit, picture: tuple[int, Path]) -> None:
    page = visit.open()
    junk = {"name": "notes.jpg", "mimeType": "image/jpeg", "buffer": b"hello"}
    page.set_input_files("#file", junk)
    page.wait_for_selector("#error:not([hidden])")
    assert "not a picture" in page.inner_text("#error-text")
    assert page.locator(".hit").count() == 0
    assert page.locator("#error-again").is_hidden()  # trying the same again would not help
    visit.keep("error")
    page.set_input_files("#file", str(picture[1]))
    page.wait_for_selector(".distance")
    assert page.locator("#error").is_hidden()
    # the server goes away and comes back
    page.route("**/v1/search*", lambda route: route.abort())
    page.locator(".hit").first.click()
    page.wait_for_selector("#error:not([hidden])")
    assert "cannot be reached" in page.inner_text("#error-text")
    page.unroute("**/v1/search*")
    page.locator("#error-again").click()
    page.wait_for_selector(".distance")
    assert page.locator("#error").is_hidden()


def test_the_loading_state(visit: Visit) -> None:
    page, held = visit.page, []
    page.route("**/v1/items?*", lambda route: held.append(route))
    page.goto(visit.url)
    page.wait_for_selector("#results[aria-busy=true] .hit.waiting")  # shapes where results will be
    assert page.inner_text("#took") == "Loading…"
    visit.keep("loading-first")
    held.pop().continue_()
    page.wait_for_selector("#results[aria-busy=false] .hit[data-id]")
    page.route("**/v1/search*", lambda route: held.append(route))
    page.locator(".hit").first.click()
    page.wait_for_selector("#results[aria-busy=true]")
    assert page.inner_text("#took") == "Searching…"
    visit.keep("loading")
    page.wait_for_function("() => true")
    for route in held:
        route.continue_()
    page.wait_for_selector("#results[aria-busy=false] .distance")


def test_a_token_is_asked_for(visit: Visit) -> None:
    def guard(route: Any) -> None:
        if route.request.headers.get("authorization") == "Bearer the-right-one":
            route.continue_()
        else:
            said = {"code": "unauthorized", "message": "no token", "request_id": "x"}
            route.fulfill(status=401, json={"error": said})

    page = visit.page
    page.route("**/v1/**", guard)
    page.goto(visit.url)
    page.wait_for_selector("#token-dialog[open]")
    visit.keep("token")
    page.keyboard.press("Escape")
    page.wait_for_selector("#error:not([hidden])")
    assert "needs a token" in page.inner_text("#error-text")
    page.locator("#error-again").click()
    for token, note in (("a-wrong-one", "Ask whoever runs it"), ("the-right-one", "not right")):
        page.wait_for_function(f"() => document.querySelector('#token-note').textContent.includes('{note}')")
        page.fill("#token", token)
        page.keyboard.press("Enter")
    page.wait_for_selector(".hit[data-id]")
    assert page.locator("#error").is_hidden()
    # pictures need the token, too
    page.wait_for_function("() => document.querySelector('.hit img')?.naturalWidth > 0")
    assert not [line for line in visit.complaints if "Content Security Policy" in line]


def test_keyboard(visit: Visit) -> None:
    page = visit.open()
    reached = set()
    for _ in range(11):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("() => document.activeElement.id"))
    assert reached >= {"file", "name", "k", "rescore", "filter"}
    page.evaluate("() => document.activeElement.blur()")
    asked: list[Any] = []
    page.on("filechooser", lambda chooser: asked.append(chooser))
    page.keyboard.press("ArrowRight")  # the first card
    first = page.evaluate("() => document.activeElement.dataset.id")
    page.keyboard.press("ArrowRight")
    second = page.evaluate("() => document.activeElement.dataset.id")
    assert first != second
    page.keyboard.press("ArrowDown")
    below = page.evaluate("() => document.activeElement.dataset.id")
    assert below not in (first, second)
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/#item={below}")
    page.wait_for_selector(".distance")
    page.keyboard.press("o")
    until = time.monotonic() + 10
    while not asked and time.monotonic() < until:
        page.wait_for_timeout(50)
    assert asked, "O opens the file dialog"


def test_a_picture_can_be_dropped_and_pasted(visit: Visit, picture: tuple[int, Path]) -> None:
    page = visit.open()
    script = """async ([kind, bytes]) => {
      const data = new DataTransfer();
      data.items.add(new File([new Uint8Array(bytes)], "digit.png", { type: "image/png" }));
      const event = kind === "drop"
        ? new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true })
        : new ClipboardEvent("paste", { clipboardData: data, bubbles: true });
      document.body.dispatchEvent(event);
    }"""
    for kind in ("drop", "paste"):
        page.goto(visit.url)
        page.wait_for_selector(".hit[data-id]")
        page.evaluate(script, [kind, list(picture[1].read_bytes())])
        page.wait_for_selector(".distance")
        assert page.inner_text("#query-name") == "digit.png"


@pytest.mark.parametrize(
    ("name", "options"), [("phone", PHONE), ("dark", DESKTOP | {"color_scheme": "dark"}), ("light", DESKTOP)]
)
def test_phone_width_and_dark_mode(
    browser: Any, url: str, run: str, name: str, options: dict[str, Any]
) -> None:
    one = Visit(browser, url, **options)
    page = one.open(f"/#item={int(BinaryIndex.load(f'{run}/index').ids()[5])}")
    page.wait_for_selector(".distance")
    one.keep(name)
    assert page.evaluate(
        "() => document.documentElement.scrollWidth <= window.innerWidth"
    )  # nothing sticks out
    script = "name => getComputedStyle(document.body)[name].match(/[0-9]+/g).map(Number)"
    colours = [page.evaluate(script, name) for name in ("backgroundColor", "color")]
    background, text = (sum(channels[:3]) for channels in colours)
    assert (background < text) == (name == "dark")
    assert abs(background - text) > 400  # readable
    assert one.complaints == []
    one.end()
