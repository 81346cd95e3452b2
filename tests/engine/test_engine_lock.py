"""Who waits for whom, and what a signal that is ignored does."""

import contextlib
import fcntl
import os
import signal

import pytest
from dsv4_overlay_tools import cli, transaction

pytestmark = pytest.mark.usefixtures("signals_as_in_a_terminal")


class Waits(Exception):
    pass


@pytest.mark.parametrize("mode", ["apply", "--revert", "--check", "--status"])
@pytest.mark.parametrize("reader", [True, False])
def test_runs_that_change_the_tree_are_alone_in_it(engine, target, monkeypatch, mode, reader):
    def waiting():
        raise Waits

    monkeypatch.setattr(cli, "_waiting", waiting)
    with contextlib.ExitStack() as held:
        other = os.open(target / "vllm", os.O_RDONLY)
        held.callback(os.close, other)
        fcntl.flock(other, fcntl.LOCK_SH if reader else fcntl.LOCK_EX)
        alone = mode in ("apply", "--revert") or not reader
        with pytest.raises(Waits) if alone else contextlib.nullcontext():
            engine(target, *([] if mode == "apply" else [mode]))


@pytest.mark.parametrize("ignored", [True, False])
def test_a_signal_that_is_ignored_does_not_stop_an_apply(engine, target, monkeypatch, ignored):
    """As below nohup."""
    real, before = transaction._expect, signal.getsignal(signal.SIGHUP)

    def expect(change):
        os.kill(os.getpid(), signal.SIGHUP)
        real(change)

    monkeypatch.setattr(transaction, "_expect", expect)
    if ignored:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        if ignored:
            assert engine.ok(target)["state"] == "applied"
        else:
            engine.refused("interrupted", target)
    finally:
        signal.signal(signal.SIGHUP, before)
