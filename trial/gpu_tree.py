"""gpu_tree.py WORKTREE TO [stamps]: a copy of a worktree's kernels, tests and benchmarks with MLA_TRIAL (and MLA_STAMPS)."""
import shutil, subprocess, sys
from pathlib import Path
src, to = Path(sys.argv[1]), Path(sys.argv[2])
stamps = "stamps" in sys.argv[3:]
shutil.rmtree(to, ignore_errors=True)
(to / "overlay/common/vllm/third_party").mkdir(parents=True)
(to / "tests").mkdir()
(to / "scripts").mkdir()
shutil.copytree(src / "csrc", to / "csrc")
shutil.copytree(src / "benchmarks", to / "benchmarks", ignore=shutil.ignore_patterns("results", "__pycache__"))
shutil.copytree(src / "overlay/common/vllm/third_party/mla_kernels", to / "overlay/common/vllm/third_party/mla_kernels", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
shutil.copytree(src / "tests/kernels", to / "tests/kernels", ignore=shutil.ignore_patterns("__pycache__"))
for f in ("VERSION", "tests/conftest.py", "scripts/build-kernels.sh", "pyproject.toml"):
    shutil.copy(src / f, to / f)
def sub(f, pairs):
    p = to / f; s = p.read_text()
    for a, b in pairs:
        assert s.count(a) == 1, (f, a, s.count(a))
        s = s.replace(a, b)
    p.write_text(s)
sub("csrc/sparse_mla_sm90.cu", [
 ("#include <algorithm>\n", "#include <algorithm>\n#include <cstdlib>\n#include <cstring>\n"),
 ("    division = m64_division(items, tiles, sms);\n", """    division = m64_division(items, tiles, sms);
    if (const char* trial = std::getenv("MLA_TRIAL")) {
      is_it = std::strncmp(trial, "new", 3) == 0 || (is_it && std::strcmp(trial, "old") != 0);
      if (std::strncmp(trial, "new", 3) == 0 && trial[3] > '1') division = {0, trial[3] - '0'};
    }
"""),
])
if stamps:
    def add(f, anchor, tag, after=True):
        p = to / f; s = p.read_text()
        assert s.count(anchor) == 1, (f, anchor, s.count(anchor))
        p.write_text(s.replace(anchor, f"{anchor}stamp({tag});\n" if after else f"stamp({tag});\n{anchor}"))
    sub("csrc/m64_rows_block.cuh", [
     ("  int whole, units;\n", "  int whole, units;\n  unsigned* stamps;\n"),
     ("    units = whole + (items - whole) * division.parts;\n", "    units = whole + (items - whole) * division.parts;\n    const char* at = std::getenv(\"MLA_STAMPS\"); stamps = at ? reinterpret_cast<unsigned*>(std::strtoull(at, nullptr, 10)) : nullptr;\n"),
     ("#include \"rows.cuh\"\n", "#include \"rows.cuh\"\n#include <cstdlib>\n"),
     ("  __device__ __forceinline__ float* floats(int offset) const { return", """  mutable unsigned stamped = 0;
  // [4 blocks][4 roles][8192][2]
  __device__ __forceinline__ void stamp(unsigned tag) const {
    unsigned now;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(now) :: "memory");
    if (lane == 0 && warp % 4 == 0 && blockIdx.x < 4 && p.stamps && stamped < 8192)
      *reinterpret_cast<uint2*>(p.stamps + ((blockIdx.x * 4 + warp / 4) * 8192 + stamped) * 2) = make_uint2(tag, now);
    ++stamped;
  }
  __device__ __forceinline__ float* floats(int offset) const { return"""),
    ])
    exec((Path(__file__).parent / "stamp_places.py").read_text())
