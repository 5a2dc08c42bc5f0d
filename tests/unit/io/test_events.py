"""Progress lines without a terminal."""

import io

from hashnet.io import Progress, events


def test_plain_lines_say_count_rate_and_time_left(monkeypatch):
    now = 0.0
    monkeypatch.setattr(events.time, "monotonic", lambda: now)
    out = io.StringIO()
    bar = Progress(100, "rows", "encode", file=out)
    now = 4.0
    bar.update(10)  # too early for a line
    assert out.getvalue() == ""
    now = 8.0
    bar.update(30, bad=2)  # 30 in the 4 s since the first
    assert out.getvalue() == "encode: 40/100 (40%) rows, 7.5/s, 8s left, bad 2\n"
    now = 20.0
    bar.update(10)  # too early for another one
    assert out.getvalue().count("\n") == 1
    now = 30.0
    bar.update(10)  # 50 in 26 s
    assert out.getvalue().splitlines()[1] == "encode: 60/100 (60%) rows, 1.9/s, 21s left, bad 2"


def test_work_that_may_end_early_says_at_most(monkeypatch):
    now = 0.0
    monkeypatch.setattr(events.time, "monotonic", lambda: now)
    out = io.StringIO()
    bar = Progress(100, "steps", "train", at_most=True, file=out)
    bar.update(10)
    now = 10.0
    bar.total = 60  # a stage ended early
    bar.update(10)
    assert out.getvalue() == "train: 20/60 (33%) steps, 1.0/s, at most 40s left\n"


def _some(total, done, **options):
    """What the last of ``done`` updates and the end say; every update is a line."""
    out = io.StringIO()
    with Progress(total, "steps", "try", file=out, **options) as bar:
        for _ in range(done):
            bar.update(1)
    return out.getvalue().splitlines()


def test_work_that_ended_early_says_so(monkeypatch):
    monkeypatch.setattr(events, "LINE_EVERY_S", 0.0)
    monkeypatch.setattr(events, "speed", lambda rate: "fast")
    last = _some(7, 5, at_most=True)[-1]
    assert last == "try: 5/7 (71%) steps, fast, stopped early, as no more are needed"
    assert "early" not in _some(5, 5, at_most=True)[-1]
    assert "early" not in _some(7, 5)[-1]  # it did not say that it may


def test_work_that_failed_did_not_stop_early(monkeypatch):
    monkeypatch.setattr(events, "LINE_EVERY_S", 0.0)
    out = io.StringIO()
    bar = Progress(7, "steps", "try", at_most=True, file=out)
    bar.update(5)
    bar.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert out.getvalue().count("\n") == 1
    assert "early" not in out.getvalue()


def test_the_last_line_says_what_the_work_came_to(monkeypatch):
    monkeypatch.setattr(events, "LINE_EVERY_S", 0.0)
    monkeypatch.setattr(events, "speed", lambda rate: "fast")
    out = io.StringIO()
    with Progress(7, "steps", "try", at_most=True, file=out) as bar:
        bar.update(5)
        bar.outcome = "chose lr 0.1"
    assert bar.said
    assert out.getvalue().splitlines()[-1] == "try: 5/7 (71%) steps, fast, chose lr 0.1"


def test_a_slow_start_does_not_spoil_the_time_left(monkeypatch):
    """Actors may take a minute to start, and what an earlier run has kept comes all at once."""
    now = 0.0
    monkeypatch.setattr(events.time, "monotonic", lambda: now)
    bar = Progress(1000, "rows", "encode", file=io.StringIO())
    now = 60.0
    bar.update(500)
    now = 61.0
    bar.update(20)
    assert bar.rate == 20.0


def test_a_short_task_says_nothing():
    out = io.StringIO()
    with Progress(3, "rows", "encode", file=out) as bar:
        bar.update(3)
    assert out.getvalue() == ""


def test_what_was_done_before_does_not_count_for_the_rate(monkeypatch):
    clock = iter([0.0, 10.0])
    monkeypatch.setattr(events.time, "monotonic", lambda: next(clock))
    bar = Progress(100, "rows", "encode", done=50, file=io.StringIO())
    bar.done += 20
    assert bar.rate == 2.0


def test_the_end_is_said_once(monkeypatch):
    monkeypatch.setattr(events, "LINE_EVERY_S", 0.0)
    out = io.StringIO()
    with Progress(2, "rows", "encode", file=out) as bar:
        bar.update(1)
        bar.update(1)
    assert [line.split(",")[0] for line in out.getvalue().splitlines()] == [
        "encode: 1/2 (50%) rows",
        "encode: 2/2 (100%) rows",
    ]
