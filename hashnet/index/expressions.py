"""``where="year >= 2020 and city in ('Rome', 'Oslo')"``: a condition, parsed into an Arrow expression.

    condition   any of: condition and condition, condition or condition, not condition, (condition)
                column == value        also = != <> < <= > >=, and the value first
                column in (value, …)   also not in
                column is null         also is not null
                column                 a column of booleans
    column      a name, or `any name` in backticks: of the index's columns, or id, key, labels
    value       2020, -1.5, 'Rome' or "Rome" (a quote inside is doubled), true, false; a date as text

``labels`` holds an item's class ids: ``labels in (3, 5)`` and ``labels = 3`` ask whether it has one of them.
A comparison with a missing value is neither true nor false, as in SQL: ``is null`` finds it, ``!=`` does not.
Numbers are compared exactly, ``year > 2019.5`` finds 2020; with a column of floats, as such a float.
Nothing is evaluated by Python.
"""

from __future__ import annotations

import decimal
import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from hashnet.errors import IndexMismatch, Unsupported

MAX_TEXT = 100_000  # characters of a condition
MAX_DEPTH = 100  # of parentheses and nots
LABELS = "labels"
KEYWORDS = ("and", "or", "not", "in", "is", "null", "true", "false")
COMPARISONS = {"=": "==", "==": "==", "!=": "!=", "<>": "!=", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
# A value that the column cannot hold lies above or below the nearest that it can: what signs become there.
ABOVE, BELOW = {"<": "<=", ">=": ">"}, {"<=": "<", ">": ">="}
EXACT = decimal.Context(prec=100, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN, rounding=decimal.ROUND_FLOOR)
TOKEN = re.compile(
    r"""(?P<space>\s+)
      | (?P<number>[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)
      | (?P<text>'(?:[^']|'')*'|"(?:[^"]|"")*")
      | (?P<quoted>`[^`]+`)
      | (?P<word>[^\W\d]\w*)
      | (?P<sign>==|=|!=|<>|<=|>=|<|>|\(|\)|,)""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Token:
    kind: str  # number, text, name, keyword, sign or end
    value: Any
    at: int  # its first character
    shown: str

    def is_(self, *values: str) -> bool:
        return self.kind in ("keyword", "sign") and self.value in values


@dataclass
class Condition:
    """An Arrow expression; ``label_sets`` names the columns of booleans it needs, one per use of labels."""

    expression: pc.Expression
    label_sets: dict[str, list[int]] = field(default_factory=dict)


def parse_condition(text: str, schema: pa.Schema, n_classes: int | None) -> Condition:
    """The condition over columns of ``schema``; IndexMismatch with the position of a mistake."""
    parser = _Parser(text, schema, n_classes)
    expression = parser.condition()
    parser.expect_end()
    return Condition(expression, parser.label_sets)


def with_class_ids(text: str, class_names: Sequence[str] | None) -> str:
    """The condition with class ids where ``labels`` are compared with names; IndexMismatch for unknown ones.

    >>> with_class_ids("labels in ('cat', 2) and city = 'cat'", ["dog", "cat", "owl"])
    "labels in (1, 2) and city = 'cat'"
    """
    if class_names is None or LABELS not in text:
        return text
    parser = _Parser(text, pa.schema([]), None)
    ids = {name: i for i, name in reversed(list(enumerate(class_names)))}
    parts, end = [], 0
    for token in _compared_with_labels(parser.tokens):
        if token.kind == "text":
            if token.value not in ids:
                hint = nearest_name(token.value, list(ids)[:1000])
                parser._fail(token.at, f"there is no label {token.shown}; {hint}")
            parts += [text[end : token.at], str(ids[token.value])]
            end = token.at + len(token.shown)
    return "".join([*parts, text[end:]])


def _compared_with_labels(tokens: Sequence[Token]) -> list[Token]:
    """The values beside ``labels =``, ``= labels`` and in ``labels in (…)``."""
    found: list[Token] = []
    for i, token in enumerate(tokens):
        if token.kind != "name" or token.value != LABELS:
            continue
        if i >= 2 and tokens[i - 1].is_(*COMPARISONS):
            found.append(tokens[i - 2])
        j = i + 1
        if tokens[j].is_(*COMPARISONS):
            found.append(tokens[j + 1])
        j += tokens[j].is_("not")
        if tokens[j].is_("in"):
            after = tokens[j + 1 :]
            ends = [n for n, one in enumerate(after) if one.is_(")") or one.kind == "end"]
            found += after[: ends[0]]
    return sorted({token.at: token for token in found}.values(), key=lambda token: token.at)


def nearest_name(name: str, names: Sequence[str]) -> str:
    """``; did you mean "year"?``, or the names there are."""
    spelt = {known.casefold(): known for known in names}
    near = difflib.get_close_matches(name.casefold(), spelt, n=1)
    if near:
        return f"did you mean {spelt[near[0]]!r}?"
    return f"there are {', '.join(sorted(names))}" if names else "the index has no columns"


class _Parser:
    """Recursive descent: or binds loosest, then and, then not."""

    def __init__(self, text: str, schema: pa.Schema, n_classes: int | None) -> None:
        self.text, self.schema, self.n_classes = text, schema, n_classes
        self.label_sets: dict[str, list[int]] = {}
        self.tokens, self.next, self.depth = self._tokens(), 0, 0

    def _tokens(self) -> list[Token]:
        if len(self.text) > MAX_TEXT:
            raise IndexMismatch(f"where= has {len(self.text)} characters; at most {MAX_TEXT} are read")
        tokens, at = [], 0
        while at < len(self.text):
            match = TOKEN.match(self.text, at)
            if match is None:
                hint = "a text without its closing quote" if self.text[at] in "'\"`" else repr(self.text[at])
                self._fail(at, f"cannot read {hint}")
            kind, shown = str(match.lastgroup), match.group()
            if kind != "space":
                tokens.append(_token(kind, shown, at))
            at = match.end()
        return [*tokens, Token("end", None, len(self.text), "the end")]

    def condition(self) -> pc.Expression:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self._fail(self.peek.at, f"more than {MAX_DEPTH} conditions inside each other")
        found = self._joined("or", lambda: self._joined("and", self._negation))
        self.depth -= 1
        return found

    def expect_end(self) -> None:
        if self.peek.kind != "end":
            self._fail_at_token("and, or, or the end")

    @property
    def peek(self) -> Token:
        return self.tokens[self.next]

    def _take(self) -> Token:
        self.next += 1
        return self.tokens[self.next - 1]

    def _accept(self, *values: str) -> bool:
        accepted = self.peek.is_(*values)
        self.next += accepted
        return accepted

    def _expect(self, value: str) -> None:
        if not self._accept(value):
            self._fail_at_token(repr(value))

    def _joined(self, word: str, part: Callable[[], pc.Expression]) -> pc.Expression:
        parts = [part()]
        while self._accept(word):
            parts.append(part())
        while len(parts) > 1:  # as a balanced tree: Arrow walks expressions recursively
            joined = [
                (a & b) if word == "and" else (a | b) for a, b in zip(parts[::2], parts[1::2], strict=False)
            ]
            parts = joined + ([parts[-1]] if len(parts) % 2 else [])
        return parts[0]

    def _negation(self) -> pc.Expression:
        negated = False
        while self._accept("not"):
            negated = not negated
        found = self._comparison()
        return ~found if negated else found

    def _comparison(self) -> pc.Expression:
        if self._accept("("):
            found = self.condition()
            self._expect(")")
            return found
        if self.peek.kind in ("number", "text") or self.peek.is_("true", "false"):
            value = self._value()
            sign = self._sign()
            return self._compare(self._column(), MIRRORED[sign], value)
        column = self._column()
        if self._accept("is"):
            negated = self._accept("not")
            self._expect("null")
            return self._is_null(column, negated)
        negated = self._accept("not")
        if self._accept("in"):
            found = self._is_in(column, self._values())
            return ~found if negated else found
        if negated:
            self._fail_at_token("'in'")
        if self.peek.is_(*COMPARISONS):
            return self._compare(column, self._sign(), self._value())
        if column.value == LABELS or not pa.types.is_boolean(self._type(column)):
            self._fail_at_token("a comparison")
        return pc.field(column.value)

    def _column(self) -> Token:
        if self.peek.kind != "name":
            self._fail_at_token("the name of a column")
        token = self._take()
        names = [*self.schema.names, *([LABELS] if self.n_classes is not None else [])]
        if token.value == LABELS and self.n_classes is None:
            raise Unsupported(
                "this index was built without labels; build it from codes with labels to filter by them"
            )
        if token.value not in names:
            self._fail(token.at, f"there is no column {token.value!r}; {nearest_name(token.value, names)}")
        return token

    def _type(self, column: Token) -> pa.DataType:
        return self.schema.field(column.value).type

    def _sign(self) -> str:
        if not self.peek.is_(*COMPARISONS):
            self._fail_at_token("a comparison")
        return COMPARISONS[self._take().value]

    def _value(self) -> Token:
        if self.peek.kind in ("number", "text") or self.peek.is_("true", "false"):
            return self._take()
        if self.peek.kind == "name":
            shown = self.peek.shown
            self._fail(self.peek.at, f"expected a value, got {shown}; write text in quotes, '{shown}'")
        if self.peek.is_("null"):
            self._fail(self.peek.at, "nothing equals null; write 'is null' or 'is not null'")
        self._fail_at_token("a value")

    def _values(self) -> list[Token]:
        self._expect("(")
        values = [self._value()]
        while self._accept(","):
            values.append(self._value())
        self._expect(")")
        return values

    def _compare(self, column: Token, sign: str, value: Token) -> pc.Expression:
        if column.value == LABELS:
            if sign not in ("==", "!="):
                self._fail(column.at, "labels are compared with =, !=, in and not in")
            found = self._has_labels([value])
            return found if sign == "==" else ~found
        scalar, beside = self._scalar(column, value)
        left, right = pc.field(column.value), pc.scalar(scalar)
        if sign in ("==", "!="):
            if beside is not None:  # equal to none of its values, and still unknown where one is missing
                right, sign = left, "!=" if sign == "==" else "=="
            return left == right if sign == "==" else left != right
        if pa.types.is_boolean(self._type(column)):
            self._fail(column.at, f"column {column.value!r} holds booleans, which have no order")
        sign = sign if beside is None else beside.get(sign, sign)
        if sign in ("<", "<="):
            return left < right if sign == "<" else left <= right
        return left > right if sign == ">" else left >= right

    def _is_in(self, column: Token, values: list[Token]) -> pc.Expression:
        if column.value == LABELS:
            return self._has_labels(values)
        kind = self._type(column)
        # 2.5 among whole numbers, 300 among bytes: equal to none of them
        scalars = [
            scalar for scalar, beside in (self._scalar(column, value) for value in values) if beside is None
        ]
        found = pc.field(column.value)
        held = found.isin(pa.array([scalar.as_py() for scalar in scalars], kind))
        # to Arrow a missing value is not among the others; here that is unknown, so that `not` keeps it out
        return pc.if_else(found.is_valid(), held, pc.scalar(pa.scalar(None, pa.bool_())))

    def _is_null(self, column: Token, negated: bool) -> pc.Expression:
        if column.value == LABELS:
            self._fail(column.at, "labels are compared with =, !=, in and not in")
        found = pc.field(column.value)
        return found.is_valid() if negated else found.is_null()

    def _has_labels(self, values: list[Token]) -> pc.Expression:
        labels = []
        for token in values:
            if not re.fullmatch(r"[-+]?\d+", token.shown):
                self._fail(token.at, f"labels are class ids, whole numbers; got {token.shown}")
            if not 0 <= token.value < (self.n_classes or 0):
                self._fail(
                    token.at,
                    f"there is no label {token.shown}: the index has {self.n_classes} classes, "
                    f"0..{(self.n_classes or 0) - 1}",
                )
            labels.append(int(token.value))
        name = f"labels {len(self.label_sets)}"
        self.label_sets[name] = labels
        return pc.field(name)

    def _scalar(self, column: Token, value: Token) -> tuple[pa.Scalar, dict[str, str] | None]:
        """The value as the column holds it, or the nearest it holds and what comparisons with that become."""
        kind = self._type(column)
        is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        fits = {
            "number": pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind),
            "text": is_text or pa.types.is_temporal(kind),
            "keyword": pa.types.is_boolean(kind),
        }
        if not fits[value.kind]:
            self._fail(
                value.at, f"column {column.value!r} holds {kind}, which cannot be compared with {value.shown}"
            )
        if value.kind == "number":
            return _number(value.value, kind)
        if value.kind == "keyword":
            return pa.scalar(value.value == "true"), None
        try:
            return pa.scalar(value.value).cast(kind), None
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            self._fail(
                value.at, f"{value.shown} is not a value of column {column.value!r}, which holds {kind}"
            )

    def _fail_at_token(self, expected: str) -> NoReturn:
        self._fail(self.peek.at, f"expected {expected}, got {self.peek.shown}")

    def _fail(self, at: int, what: str) -> NoReturn:
        start = max(0, at - 40)
        around = self.text[start : at + 40]
        raise IndexMismatch(f"where= at position {at}: {what}\n  {around}\n  {' ' * (at - start)}^")


def _number(value: Decimal, kind: pa.DataType) -> tuple[pa.Scalar, dict[str, str] | None]:
    """See ``_Parser._scalar``. Arrow would compare as float64, or refuse a number that needs more digits."""
    if pa.types.is_floating(kind):
        return pa.scalar(float(value), kind), None
    places, low, high = _range(kind)
    if value > high:
        return _held(high, kind), ABOVE
    if value < low:
        return _held(low, kind), BELOW
    held = EXACT.quantize(value, EXACT.scaleb(Decimal(1), -places))  # rounded down
    return _held(held, kind), None if held == value else ABOVE


def _range(kind: pa.DataType) -> tuple[int, Decimal, Decimal]:
    """Decimal places, the least and the greatest number of a type of integers or decimals."""
    if pa.types.is_decimal(kind):
        high = EXACT.scaleb(Decimal(10**kind.precision - 1), -kind.scale)
        return kind.scale, high.copy_negate(), high
    if pa.types.is_signed_integer(kind):
        half = 1 << (kind.bit_width - 1)
        return 0, Decimal(-half), Decimal(half - 1)
    return 0, Decimal(0), Decimal((1 << kind.bit_width) - 1)


def _held(value: Decimal, kind: pa.DataType) -> pa.Scalar:
    return pa.scalar(value if pa.types.is_decimal(kind) else int(value), kind)


def _token(kind: str, shown: str, at: int) -> Token:
    if kind == "number":
        try:
            return Token("number", Decimal(shown), at, shown)
        except decimal.InvalidOperation:  # an exponent of more than 18 digits
            return Token("number", Decimal(float(shown)), at, shown)
    if kind == "text":
        quote = shown[0]
        return Token("text", shown[1:-1].replace(quote * 2, quote), at, shown)
    if kind == "quoted":
        return Token("name", shown[1:-1], at, shown)
    if kind == "word" and shown.lower() in KEYWORDS:
        return Token("keyword", shown.lower(), at, shown)
    return Token("name" if kind == "word" else "sign", shown, at, shown)
