"""Signals at any place of a program."""

import gc
import itertools
import sys
import threading


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
