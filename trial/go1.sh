set -u
cd $(dirname $0); cp -r . /tmp/m64; cd /tmp/m64
use() { export MLA_REPO=/tmp/m64/repo_$1 MLA_LIB=/tmp/m64/lib_$1.so; }
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
use fast
c() { timeout 200 python3 m64_check.py --only "${@:2}" > $OUT/check_$1.log 2>&1; }
c 656 basic:656 shapes:656 edges:656 ranges:656 many:656 repeat:656 &
c 584 basic:584 shapes:584 edges:584 ranges:584 many:584 repeat:584 &
c p656 parts:656 & c p584 parts:584 & c 576 basic:576 shapes:576 & 
use plain; c plain basic:656 shapes:656 many:656 & wait
for f in 656 584 p656 p584 576 plain; do echo "== $f: ok $(grep -c '   ok ' $OUT/check_$f.log) BAD $(grep -c BAD $OUT/check_$f.log)"; grep -E 'BAD| [0-9]+ s$' $OUT/check_$f.log | cut -c1-200 | head -12; done
nvidia-smi --query-gpu=name,clocks.sm,power.draw --format=csv,noheader
export TIMES="16 64 128 512"
use plain; timeout 60 python3 m64_check.py --flashmla /tmp/m64/fm --only times:656 times:584 2>&1 | tee -a $OUT/times.log
use fast; timeout 60 python3 m64_check.py --flashmla /tmp/m64/fm --only times:656 times:584 2>&1 | tee -a $OUT/times.log
timeout 100 python3 m64_check.py --only small:584 small:656 > $OUT/small.log 2>&1; tail -3 $OUT/small.log
for v in stamps faststamps; do mkdir -p /tmp/st/$v; export OUT_STAMPS=/tmp/st/$v; use $v; timeout 60 python3 m64_check.py --only stamps:584 stamps:656 2>&1 | grep -v ==; done
use stamps; export OUT_STAMPS=/tmp/st/stamps; timeout 60 python3 m64_check.py --only stamps:576
cd /tmp/st; XZ_OPT=-T8 tar cJf $OUT/stamps.tar.xz */*.npy; ls -la $OUT
python3 -c 'import pytest' ; which compute-sanitizer nvcc
