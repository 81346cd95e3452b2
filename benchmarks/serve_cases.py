"""What serve.py measures of a server: how long prompts and answers are, how they come, and how many at once."""

from __future__ import annotations

import argparse
import re
import shlex
from dataclasses import dataclass, field

from e2e import positive

GOAL = re.compile(r"(ttft|tpot|e2el):[1-9]\d*")
NUMBERS = re.compile(r"[1-9]\d*(,[1-9]\d*)*")
SHAPE = re.compile(r"([1-9]\d*)(k?)/([1-9]\d*)(k?)")


@dataclass(frozen=True)
class Case:
    """`load` is `burst`, as many prompts as run at once, `steady`, `times` as many, or the prompts a second."""

    input_len: int
    output_len: int
    load: str
    count: int  # at once
    times: int
    only_shape: bool
    repeat: int = field(repr=False)  # measurements; not in what prompts are drawn from

    @property
    def label(self) -> str:
        """The number at once, after whatever is not as in a burst of the only shape."""
        words = [] if self.only_shape else [f"{self.input_len}/{self.output_len}"]
        return " ".join([*words, *([] if self.load == "burst" else [self.load]), str(self.count)])

    @property
    def prompts(self) -> int:
        return self.count if self.load == "burst" else self.count * self.times

    def client_options(self) -> list[str]:
        """For `vllm bench serve`."""
        rate = [] if self.load in ("burst", "steady") else ["--request-rate", self.load]
        return ["--num-prompts", str(self.prompts), "--max-concurrency", str(self.count), *rate]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--concurrency", default="16,32,64,256", help="default: %(default)s")
    parser.add_argument("--repeat", default="1", help="measurements of each, or as many numbers as --concurrency "
                        "has (default: %(default)s)")  # fmt: skip
    parser.add_argument("--input-len", type=positive, help="tokens of a prompt (default: 8192)")
    parser.add_argument("--output-len", type=positive, help="tokens of an answer (default: 8192)")
    parser.add_argument("--shapes", metavar="IN/OUT,…", help="several of them, as in 1k/8k,8k/1k,8k/8k")
    parser.add_argument("--load", default="burst", help="burst, steady or prompts a second; default: %(default)s")
    parser.add_argument("--times", type=int, default=10, help="without burst, prompts by those at once; "
                        "default: %(default)s")  # fmt: skip
    parser.add_argument(
        "--goodput", nargs="+", default=[], metavar="GOAL:MS", help="ttft:2000 tpot:50, for instance"
    )


def cases(args: argparse.Namespace) -> list[Case]:
    """Raises ValueError, with a sentence, for options that make no sense."""
    if not NUMBERS.fullmatch(args.concurrency):
        raise ValueError(f"--concurrency is {args.concurrency!r}; write whole numbers with commas between them.")
    counts, repeats = args.concurrency.split(","), args.repeat.split(",")
    if not NUMBERS.fullmatch(args.repeat) or len(repeats) not in (1, len(counts)):
        raise ValueError(f"--repeat is {args.repeat}; give 1 or more, or one such number for each --concurrency.")
    repeat_of = dict(zip(counts, repeats * (len(counts) // len(repeats)), strict=True))
    if args.shapes is None:
        shapes = [(args.input_len or 8192, args.output_len or 8192)]
    elif args.input_len is not None or args.output_len is not None:
        raise ValueError("--shapes has what --input-len and --output-len say; give one or the other.")
    else:
        pairs = [SHAPE.fullmatch(shape) for shape in args.shapes.split(",")]
        if not all(pairs):
            raise ValueError(
                f"--shapes is {args.shapes!r}; write tokens in and out, as in 1k/8k,8k/1k (k is 1024)."
            )
        shapes = [(int(pair[1]) << 10 * bool(pair[2]), int(pair[3]) << 10 * bool(pair[4])) for pair in pairs]
    if not all(re.fullmatch(r"burst|steady|(?=.*[1-9])\d+(\.\d+)?", load) for load in args.load.split(",")):
        raise ValueError(
            f"--load is {args.load!r}; write burst, steady or prompts a second, with commas between them."
        )
    if args.times < 2:
        raise ValueError(f"--times is {args.times}; give 2 or more: --load burst is once.")
    for goal in args.goodput:
        if not GOAL.fullmatch(goal):
            raise ValueError(f"--goodput has {goal!r}; write ttft, tpot or e2el, a colon and milliseconds.")
    return [
        Case(*shape, load, int(count), args.times, len(shapes) == 1, int(repeat))
        for shape in shapes
        for load in args.load.split(",")
        for count, repeat in repeat_of.items()
    ]


@dataclass(frozen=True)
class Run:
    """A server: options of `vllm serve`, and what is set in its environment."""

    options: list[str]
    environment: dict[str, str]

    def more(self, words: str) -> Run:
        """With further words, as in a shell: first what is set, NAME=VALUE, then options."""
        every = shlex.split(words)
        first = next((n for n, word in enumerate(every) if not re.match(r"[A-Z_][A-Z0-9_]*=", word)), len(every))
        sets = dict(word.split("=", 1) for word in every[:first])
        return Run(self.options + every[first:], self.environment | sets)


def add_runs(runs: dict[str, Run], given: list[str]) -> dict[str, Run]:
    """`runs` and those of --run NAME=RUN WORDS. Raises ValueError, with a sentence."""
    found = dict(runs)
    for text in given:
        match = re.fullmatch(r"(\w+)=(\w+)\s+(.+)", text)
        if not match or match[1] in found or match[2] not in found:
            raise ValueError(f"--run is {text!r}; write NAME=RUN and further words, with a new NAME and one of "
                             f"{', '.join(found)} as RUN.")  # fmt: skip
        try:
            found[match[1]] = found[match[2]].more(match[3])
        except ValueError as error:  # a quotation that does not end
            raise ValueError(f"--run is {text!r}, which a shell could not read ({error}).") from None
    return found
