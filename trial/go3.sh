set -u
cd $(dirname $0); cp -r . /tmp/m64; cd /tmp/m64
use() { export MLA_REPO=/tmp/m64/repo_$1 MLA_LIB=/tmp/m64/lib_$1.so; }
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2 PYTHONPATH=/tmp/m64/py
use pipe
timeout 20 python3 m64_check.py --only basic:584 > $OUT/check_first.log 2>&1; tail -4 $OUT/check_first.log | cut -c1-120
c() { timeout 50 python3 m64_check.py --only "${@:2}" > $OUT/check_$1.log 2>&1; }
c 656 basic:656 shapes:656 edges:656 ranges:656 many:656 repeat:656 &
c 584 shapes:584 edges:584 ranges:584 many:584 repeat:584 &
c p656 parts:656 & c p584 parts:584 & c bf basic:576 shapes:576 many:512 &
K=/tmp/m64/repo_pipe/overlay/common/vllm/third_party/mla_kernels; mkdir -p $K/lib; cp lib_pipe.so $K/lib/libmla_kernels.so
(cd repo_pipe/tests/kernels; timeout 50 python3 -m pytest -q -c /dev/null --rootdir . --confcutdir . -p no:cacheprovider -W ignore test_flash_mla.py -k "sm90 and (graph or garbage or strided or batches) or 64_heads" > $OUT/pytest.log 2>&1) &
for tool in memcheck racecheck synccheck; do timeout 50 compute-sanitizer --tool $tool --kernel-name kns=sparse_mla --error-exitcode 9 --print-limit 3 python3 sanit.py > /tmp/san_$tool.log 2>&1 & done; wait
for f in 656 584 p656 p584 bf; do echo "== $f: ok $(grep -c '   ok ' $OUT/check_$f.log) BAD $(grep -c BAD $OUT/check_$f.log)"; grep -E 'BAD| [0-9]+ s$' $OUT/check_$f.log | cut -c1-120 | head -12; done
tail -4 $OUT/pytest.log | cut -c1-200
for t in memcheck racecheck synccheck; do echo "$t: $(tail -3 /tmp/san_$t.log | cut -c1-200)"; done
nvidia-smi --query-gpu=name,clocks.sm,power.draw --format=csv,noheader
{ for v in p0 p64 c16; do echo "--- $v"; use $v; TIMES="128 512" timeout 30 python3 m64_check.py --only times:656 times:584 2>&1 | grep heads; done
echo "--- pipe"; use pipe; TIMES="16 128 512" timeout 60 python3 m64_check.py --flashmla /tmp/m64/fm --only times:656 times:584 2>&1 | grep heads; } > /tmp/times.log; cat /tmp/times.log
v=pipestamps; mkdir -p /tmp/st/$v; export OUT_STAMPS=/tmp/st/$v; use $v; timeout 60 python3 m64_check.py --only stamps:584 stamps:656 2>&1 | grep -v ==
cd /tmp/st; tar cJf $OUT/stamps.tar.xz */*.npy
