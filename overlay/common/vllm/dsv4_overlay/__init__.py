# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""Glue between vLLM and the kernels in `vllm.third_party.mla_kernels`; see the
overlay's README.

`config` decides and refuses, `attention` runs a layer; `adapter` holds what differs
between vLLM releases.
"""

# What the kernels were called up to 0.2.0. Nothing here imports it; users may, and only
# what is named is applied.
OLD_KERNELS = "vllm.third_party.dsv4_kernels"
