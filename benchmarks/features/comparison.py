"""How far a run is from its reference, and how far it may be."""

from __future__ import annotations

from typing import Any

import numpy as np
from e2e import compare_top, summary

OTHER_KL, OTHER_MARGIN, CONTROL_KL = 2e-2, 1.5, 0.1


def difference(reference: list[dict], run: list[dict]) -> dict[str, Any]:
    """Mean KL and the like over equal contexts, of decode steps and of prompts, the largest of one sequence, and
    where greedy tokens part."""
    parts: dict[str, list] = {"decode": [], "prompt": []}
    diverged = []
    for i, (a, b) in enumerate(zip(reference, run, strict=True)):
        n = min(len(a["tokens"]), len(b["tokens"]))
        differ = np.flatnonzero(a["tokens"][:n] != b["tokens"][:n])
        if len(differ):
            at = int(differ[0])
            given = dict(zip(a["ids"][at].tolist(), a["values"][at].tolist(), strict=True))
            least = min(given.values())  # a token that is not among the most likely is no likelier than this
            margin = given[int(a["tokens"][at])] - given.get(int(b["tokens"][at]), least)
            diverged.append({"prompt": i, "at": at, "margin": margin})
            n = at + 1  # the context is still the same
        parts["decode"].append(compare_top(a["ids"][:n], a["values"][:n], b["ids"][:n], b["values"][:n]))
        if len(a["prompt_ids"]) and len(b["prompt_ids"]):
            arrays = (x[k] for x in (a, b) for k in ("prompt_ids", "prompt_values"))
            parts["prompt"].append(compare_top(*arrays))
    worst = {name: {"kl_worst_prompt": max(float(one["kl"].mean()) for one in found)}
             for name, found in parts.items() if found}  # fmt: skip
    return {name: summary(parts[name]) | of for name, of in worst.items()} | {"diverged": diverged}


def allowed(noises: list[dict | None], other_arithmetic: bool) -> tuple[dict[str, float], float]:
    """The largest mean KL of each part and the largest margin, as the docstring of features_e2e.py says.

    Args:
        noises: what `difference` found where nothing but noise could differ.
        other_arithmetic: whether the run rounds elsewhere than the reference, and no noise says by how much.
    """
    kl, margin = {"decode": 1e-3, "prompt": 1e-3}, 0.2
    if other_arithmetic:
        return dict.fromkeys(kl, OTHER_KL), OTHER_MARGIN
    for noise in noises:
        for part in kl.keys() & (noise or {}).keys():
            kl[part] = max(kl[part], 4 * noise[part]["kl_mean"])
            margin = max(margin, 2 * noise[part]["logprob_diff_max"])
    return kl, margin
