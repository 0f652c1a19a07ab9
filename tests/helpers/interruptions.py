"""Signals at any place of a program, and threads that end before their work."""

import gc
import itertools
import sys
import threading

from tests.helpers import seams


def raise_ctrl_c():
    """Raises what Python's own handler of Ctrl-C raises."""
    raise KeyboardInterrupt


def interrupt(call, place, handler=raise_ctrl_c):
    """Calls `call` with a signal at a place of its Python code; True if reached.

    Python runs signal handlers when functions begin and after they have returned. No
    garbage is collected meanwhile: finalizers would be places of their own.
    """
    left, hit = itertools.count(-place), []

    def trace(frame, event, argument):
        if event in ("call", "return") and next(left) == 0:
            hit.append(frame)
            sys.settrace(None)
            handler()
        return trace

    before = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        gc.enable()
    return bool(hit)


def ends(work):
    """Returns True if `work` ends on another thread, which may hang."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    return not thread.is_alive()


def end_threads(monkeypatch, name=None, *, count=sys.maxsize):
    """The first threads, or those of a name, end before their work: without memory."""
    ended, run = itertools.count(), threading.Thread.run

    def end(thread):
        if name not in (None, thread.name) or next(ended) >= count:
            run(thread)

    seams.replace(monkeypatch, "threads.look_secs", 0.05)
    monkeypatch.setattr(threading.Thread, "run", end)
