# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""Glue between vLLM and the kernels in `vllm.third_party.mla_kernels`; see
docs/contributing.md of vllm-dsv4-overlay.

`config` decides and refuses, `attention` runs a layer; `adapter` holds what differs
between vLLM releases.
"""
