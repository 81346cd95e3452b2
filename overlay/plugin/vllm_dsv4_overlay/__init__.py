# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""The wheel of the drop-in; `plugin` is what vLLM loads. `dsv4_overlay` and
`third_party` are the folders of these names that the patch-set puts into vLLM."""
