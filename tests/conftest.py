"""Names what is running when a minute has passed without a result; signals as in a terminal."""

import signal
import threading
import time

import pytest


class Patience:
    def __init__(self, terminal, seconds):
        self.terminal, self.seconds = terminal, seconds
        self.started, self.said, self.ended = {}, time.monotonic(), threading.Event()

    def pytest_sessionstart(self):
        threading.Thread(target=self.watch, daemon=True).start()

    def pytest_sessionfinish(self):
        self.ended.set()

    def pytest_runtest_logstart(self, nodeid):
        self.started[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid):
        self.started.pop(nodeid, None)
        self.said = time.monotonic()

    def watch(self):
        while not self.ended.wait(1):
            now = time.monotonic()
            if now - self.said >= self.seconds:
                running = list(self.started.items())
                lines = [f"running for {now - start:.0f} s: {name}" for name, start in running]
                self.terminal.write("\n" + "\n".join(lines or ["looking for tests"]) + "\n", flush=True)
                self.said = now


@pytest.hookimpl(trylast=True)  # the terminal's reporter comes to be in this hook
def pytest_configure(config):
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal and not hasattr(config, "workerinput"):  # of several processes, the one that reports
        config.pluginmanager.register(Patience(terminal, seconds=60))


@pytest.fixture
def signals_as_in_a_terminal():
    """In the background of a shell, or below nohup, they are ignored, also in what a test starts."""
    as_started = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in as_started.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
