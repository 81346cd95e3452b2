# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""The drop-in without a patch: vLLM calls `register` in each of its processes, and it
sets at run time what the patches of the series drop-in and mtp-padding write into
vLLM's files.

Nothing but the standard library is imported at the top: vLLM logs an import error of a
plugin and goes on without it.
"""

import functools
import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

DISTRIBUTION = "vllm-dsv4-overlay"
SETTING = "VLLM_DSV4_DROP_IN"
FUNCTIONS = ("flash_mla_with_kvcache", "flash_mla_sparse_fwd")
OPS = "vllm.v1.attention.ops.flashmla"
STOCK = "is not in use, and stock vLLM runs"
PADDED = "leaves q padded to 64 heads, as stock vLLM does"
GATHERED = "leaves V4's prefills as stock vLLM has them"
NEGATIVE = "leaves MTP as stock vLLM has it, which may hang"

logger = logging.getLogger(__name__)


class Refused(ValueError):
    """The setting means nothing; one sentence."""


class Unfit(Exception):
    """The drop-in cannot be set in this process; the text is a clause that says why,
    and what to do."""


def guarded(otherwise: str) -> Callable[[Callable], Callable]:
    """A step that never stops a server which did not ask for the drop-in by
    VLLM_DSV4_DROP_IN=1: a warning says what happens `otherwise`, and why."""

    def guard(step: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(step)
        def run(*args: object) -> None:
            try:
                step(*args)
            except Refused:
                raise
            except Exception as error:
                foreseen = isinstance(error, Unfit)
                why = str(error) if foreseen else f"{type(error).__name__}: {error}"
                if os.environ.get(SETTING) == "1":
                    raise RuntimeError(
                        f"{SETTING}=1 asks for {DISTRIBUTION}, but {why}."
                    ) from error
                logger.warning(
                    "%s %s %s: %s.",
                    DISTRIBUTION,
                    metadata.version(DISTRIBUTION),
                    otherwise,
                    why,
                    exc_info=not foreseen,
                )

        return run

    return guard


@functools.cache  # vLLM may load its plugins more than once in a process
@guarded(STOCK)
def register() -> None:
    """Set the drop-in's seams in this process, or say in one line of the log why not.

    Leaves CUDA alone. Modules of vLLM that are not imported yet are changed when they
    are.

    Raises:
        Refused: VLLM_DSV4_DROP_IN is neither 0 nor 1.
        RuntimeError: the drop-in cannot be set, and VLLM_DSV4_DROP_IN=1 asks for it.
    """
    # vLLM's logging shows what is below its own logger only.
    logging.getLogger(__package__).parent = logging.getLogger("vllm")
    import vllm
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    ours = metadata.version(DISTRIBUTION)
    if os.environ.get(SETTING) == "0":
        logger.info("%s %s is off: %s=0.", DISTRIBUTION, ours, SETTING)
        return
    package = Path(vllm.__file__).parent
    # A series may add no module, and a wheel built from patched sources has no record.
    marks = ("_dsv4_overlay/record.json", "dsv4_overlay/__init__.py")
    if any((package / mark).is_file() for mark in marks):
        leave_to_patches(package, ours)
        return
    release = vllm.__version__.partition("+")[0]
    check_files(package.parent, release, "drop-in")
    from .dsv4_overlay import drop_in

    try:
        drop_in.switched_on(None)
    except ValueError as error:
        raise Refused(*error.args) from None
    seams = SEAMS | seam_of_mtp(package.parent, release, ours)
    sys.meta_path.insert(0, AfterImport(seams))
    for name in seams.keys() & sys.modules.keys():
        for seam in seams[name]:
            seam(sys.modules[name])
    logger.info(
        "%s %s, a plugin, has set its drop-in for FlashMLA in vLLM %s; workers log "
        "what it serves.",
        DISTRIBUTION,
        ours,
        release,
    )


def leave_to_patches(package: Path, ours: str) -> None:
    """Where patches are applied they alone count, the drop-in's or others."""
    record = package / "_dsv4_overlay" / "record.json"  # none in a wheel built from it
    theirs = record.is_file() and json.loads(record.read_text())["overlay_version"]
    theirs = theirs or "of unknown version"
    if (
        b"vllm.dsv4_overlay"
        not in (package / "v1/attention/ops/flashmla.py").read_bytes()
    ):
        raise Unfit(
            f"{DISTRIBUTION} {theirs} is patched into this vLLM without its drop-in; "
            "apply all of it, or revert it (apply-patches.sh)"
        )
    level = logging.INFO if theirs == ours else logging.WARNING
    logger.log(
        level,
        "%s is both patched into this vLLM (%s) and installed as a plugin (%s): the "
        "patches count, and the plugin does nothing.",
        DISTRIBUTION,
        theirs,
        ours,
    )


@functools.cache
def known() -> dict[str, dict[str, dict[str, list[str]]]]:
    """By series and release, the files that its seams are in or rely on: sha256."""
    return json.loads(Path(__file__).with_name("pins.json").read_text())


def check_files(root: Path, release: str, series: str) -> None:
    """Raise `Unfit` unless the files of `root`/vllm that `series` needs are those of a
    release that it has."""
    releases = known()[series]
    if release not in releases:
        raise Unfit(
            f"this is vLLM {release}, and it knows {', '.join(releases)}; install a "
            f"version of it that knows {release}, or pip uninstall {DISTRIBUTION}"
        )
    for path, pins in releases[release].items():
        file = root / path
        if not file.is_file():
            raise Unfit(f"{file} is missing, which vLLM {release} has")
        if hashlib.sha256(file.read_bytes()).hexdigest() not in pins:
            raise Unfit(
                f"{file} is not as vLLM {release} has it; install the released vLLM"
            )


def seam_of_mtp(root: Path, release: str, ours: str) -> dict:
    """Where vLLM has not mended it. A file of another's mending is left as it is."""
    if release in known()["mtp-padding"]:
        try:
            check_files(root, release, "mtp-padding")
            return {"vllm.v1.attention.backends.mla.indexer": (clamp_lengths,)}
        except Unfit as why:
            logger.warning("%s %s %s: %s.", DISTRIBUTION, ours, NEGATIVE, why)
    return {}


class AfterImport(MetaPathFinder):
    """Calls each of `actions[name]` with the module `name` whenever that has been
    imported."""

    def __init__(self, actions: dict[str, tuple[Callable[[ModuleType], None], ...]]):
        self.actions = actions

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        if name not in self.actions:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for action in self.actions[name]:
                action(module)

        spec.loader.exec_module = exec_module
        return spec


@guarded(STOCK)
def replace_functions(ops: ModuleType) -> None:
    """Replace FlashMLA's two sparse calls in `ops`, and in modules that have imported
    them from it."""
    from .dsv4_overlay import drop_in

    stock = {name: getattr(ops, name) for name in FUNCTIONS}
    drop_in.install(vars(ops))
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        names = object.__getattribute__(module, "__dict__")  # loads no lazy module
        for name, function in stock.items():
            # Not where it is defined: FlashMLA's own function stays what it is.
            home = names.get("__name__") == function.__module__
            if names.get(name) is function and not home:
                names[name] = getattr(ops, name)


class Padded:
    """An attribute whose value is decided when vLLM sets it: `__init__` sizes buffers
    by it a few lines later."""

    def __init__(self, name: str, decide: Callable[[int, int], int]):
        self.name, self.decide = name, decide

    def __get__(self, layer: object, owner: type) -> int:
        return layer.__dict__[self.name]

    def __set__(self, layer: object, stock: int) -> None:
        layer.__dict__[self.name] = self.decide(layer.num_heads, stock)


@guarded(PADDED)
def pad_v32(module: ModuleType) -> None:
    """V3.2 and GLM-5, and classes that derive from theirs."""
    from .dsv4_overlay import drop_in

    for name, rows in ("fp8_decode_padded_heads", "v32"), ("prefill_padding", "bf16"):
        decide = functools.partial(drop_in.padded_heads, rows=rows)
        setattr(module.FlashMLASparseImpl, name, Padded(name, decide))


@guarded(PADDED)
def pad_v4(module: ModuleType) -> None:
    """V4 from 0.22.0 on, and V4.1."""
    from .dsv4_overlay import drop_in

    name = "DeepseekV4FlashMLAAttention"  # from 0.23.0 on
    cls = getattr(module, name, None) or module.DeepseekV4FlashMLASparseImpl
    stock = cls.get_padded_num_q_heads.__func__
    rows = "v41" if "deepseek_v41" in module.__name__ else "v4"

    def get_padded_num_q_heads(cls: type, num_heads: int) -> int:
        return drop_in.padded_heads(num_heads, stock(cls, num_heads), rows)

    cls.get_padded_num_q_heads = classmethod(get_padded_num_q_heads)


@guarded(PADDED)
def pad_first_v4(module: ModuleType) -> None:
    """V4 in 0.20.2 and 0.21.0, where nothing is sized by `padded_heads` before the
    first call of a layer."""
    from .dsv4_overlay import drop_in

    def padding(stock: Callable[..., None], heads: str) -> Callable[..., None]:
        @functools.wraps(stock)
        def __init__(layer: object, *args: object, **more: object) -> None:
            stock(layer, *args, **more)
            layer.padded_heads = drop_in.padded_heads(
                getattr(layer, heads), layer.padded_heads
            )

        return __init__

    for name, heads in (
        ("DeepseekV4MLAAttention", "num_heads"),
        ("DeepseekV4MultiHeadLatentAttentionWrapper", "n_local_heads"),
    ):
        cls = getattr(module, name)
        cls.__init__ = padding(cls.__init__, heads)


@guarded(GATHERED)
def offer_prefills(module: ModuleType) -> None:
    """V4's layers, all releases."""
    from .dsv4_overlay import drop_in

    names = (
        "DeepseekV4FlashMLAAttention",  # from 0.23.0 on
        "DeepseekV4FlashMLASparseImpl",  # 0.22.0, 0.22.1: class methods
        "DeepseekV4MLAAttention",
    )
    cls = next(getattr(module, name) for name in names if hasattr(module, name))
    method = vars(cls)["_forward_prefill"]
    stock = getattr(method, "__func__", method)

    # vLLM names all that it gives.
    @functools.wraps(stock)
    def _forward_prefill(owner: object, **given: object) -> None:
        names = "q", "output", "attn_metadata", "swa_metadata"
        layer = given.get("layer", owner)
        if not drop_in.prefill(layer, *(given[name] for name in names)):
            stock(owner, **given)

    is_method = method is stock
    cls._forward_prefill = (
        _forward_prefill if is_method else classmethod(_forward_prefill)
    )


@guarded(NEGATIVE)
def clamp_lengths(module: ModuleType) -> None:
    """MTP up to 0.27.1: a request of padding has length 0, and all of its tokens."""
    cls = module.DeepseekV32IndexerMetadataBuilder
    stock = cls._prepare_decode_tensors

    # vLLM names all that it gives.
    @functools.wraps(stock)
    def _prepare_decode_tensors(builder: object, **given: object) -> tuple:
        found = stock(builder, **given)
        if given["max_decode_len"] > 1:
            found[0].clamp_(min=0)
        return found

    cls._prepare_decode_tensors = _prepare_decode_tensors


SEAMS: dict[str, tuple[Callable[[ModuleType], None], ...]] = {
    OPS: (replace_functions,),
    "vllm.v1.attention.backends.mla.flashmla_sparse": (pad_v32,),
    "vllm.models.deepseek_v4.nvidia.flashmla": (pad_v4, offer_prefills),
    "vllm.models.deepseek_v41.nvidia.flashmla": (pad_v4,),
    "vllm.model_executor.layers.deepseek_v4_attention": (pad_first_v4, offer_prefills),
}
