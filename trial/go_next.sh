# Checks of the candidate "over" (w-m64b-next), sanitizers, times of both, clock stamps are not in.
set -u
cd $(dirname $0); cp -r . /tmp/m64; cd /tmp/m64
use() { if [ $1 = over ]; then export MLA_REPO=/tmp/m64/repo_over MLA_LIB=/tmp/m64/lib_over.so; else export MLA_REPO=/tmp/m64/repo MLA_LIB=/tmp/m64/libm64.so; fi; }
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=3 PYTHONPATH=/tmp/m64/py
use over
c() { timeout 60 python3 m64_check.py --only "${@:2}" > $OUT/check_$1.log 2>&1; }
c 656 basic:656 shapes:656 edges:656 ranges:656 many:656 repeat:656 &
c 584 basic:584 shapes:584 edges:584 ranges:584 many:584 repeat:584 &
c p656 parts:656 & c p584 parts:584 &
for tool in memcheck racecheck synccheck; do timeout 60 compute-sanitizer --tool $tool --kernel-name kns=sparse_mla --error-exitcode 9 --print-limit 3 python3 sanit.py > $OUT/san_$tool.log 2>&1 & done; wait
for f in 656 584 p656 p584; do echo "== $f: ok $(grep -c '   ok ' $OUT/check_$f.log) BAD $(grep -c BAD $OUT/check_$f.log)"; grep -E 'BAD' $OUT/check_$f.log | cut -c1-120; done
for t in memcheck racecheck synccheck; do tail -1 $OUT/san_$t.log; done
for v in ready over; do echo "--- $v"; use $v; TIMES="16 128 512" timeout 60 python3 m64_check.py --flashmla /tmp/m64/fm --only times:656 times:584 2>&1 | grep heads; done
