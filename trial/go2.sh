set -u
cd $(dirname $0); cp -r . /tmp/m64; cd /tmp/m64
use() { export MLA_REPO=/tmp/m64/repo_$1 MLA_LIB=/tmp/m64/lib_$1.so; }
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=3
use epi
c() { timeout 75 python3 m64_check.py --only "${@:2}" > $OUT/check_$1.log 2>&1; }
c 656 basic:656 shapes:656 edges:656 ranges:656 many:656 repeat:656 &
c 584 basic:584 shapes:584 edges:584 ranges:584 many:584 repeat:584 &
c p656 parts:656 & c p584 parts:584 & c bf basic:576 shapes:576 many:512 &
K=/tmp/m64/repo_epi/overlay/common/vllm/third_party/mla_kernels; mkdir -p $K/lib; cp lib_epi.so $K/lib/libmla_kernels.so
(cd repo_epi/tests/kernels; PYTHONPATH=/tmp/m64/py timeout 75 python3 -m pytest -q -x -c /dev/null --rootdir . --confcutdir . -p no:cacheprovider test_flash_mla.py -k "sm90 and (graph or garbage or strided or batches) or 64_heads" > $OUT/pytest.log 2>&1) & wait
for f in 656 584 p656 p584 bf; do echo "== $f: ok $(grep -c '   ok ' $OUT/check_$f.log) BAD $(grep -c BAD $OUT/check_$f.log)"; grep -E 'BAD| [0-9]+ s$' $OUT/check_$f.log | cut -c1-140 | head -12; done
tail -15 $OUT/pytest.log | cut -c1-200
nvidia-smi --query-gpu=name,clocks.sm,power.draw --format=csv,noheader
{ for v in fetch pf1 pf2; do echo "--- $v"; use $v; TIMES="128 512" timeout 40 python3 m64_check.py --only times:656 times:584 2>&1 | grep heads; done
echo "--- epi"; use epi; TIMES="1 16 128 512" timeout 60 python3 m64_check.py --flashmla /tmp/m64/fm --only times:656 times:584 2>&1 | grep heads; } > $OUT/times.log; cat $OUT/times.log
v=epistamps; mkdir -p /tmp/st/$v; export OUT_STAMPS=/tmp/st/$v; use $v; timeout 60 python3 m64_check.py --only stamps:584 stamps:656 2>&1 | grep -v ==
cd /tmp/st; XZ_OPT=-T8 tar cJf $OUT/stamps.tar.xz */*.npy
