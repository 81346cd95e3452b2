# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""What `mla_kernels` was called up to 0.2.0: the same functions, and operators."""

import torch

from .mla_kernels import *  # noqa: F403

torch.ops.dsv4_kernels = torch.ops.mla_kernels
