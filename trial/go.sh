# BF16 weights with a low part for 4 (as merged), 2 and 0 of a tile's four steps of 16 keys: errors, then times.
set -u
cd $(dirname $0); rm -rf /tmp/terms; cp -r . /tmp/terms; cd /tmp/terms
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4 PYTHONPATH=/tmp/terms/py MLA_REPO=/tmp/terms/repo
for k in 4 2 0; do
    export MLA_LIB=/tmp/terms/lib_$k.so; echo "--- low parts in $k steps"
    timeout 60 python3 err.py sm90 $([ $k = 4 ] && echo triton) > $OUT/err_$k.log 2>&1; cat $OUT/err_$k.log | cut -c1-110
done
for k in 4 2 0; do
    (cd repo; scripts/build-kernels.sh --from /tmp/terms/lib_$k.so | tail -1
     timeout 110 python3 benchmarks/sparse_mla.py --rounds 1 --rows bf16 576 --flashmla /tmp/terms/fm --out $OUT/times_$k.json > $OUT/times_$k.log 2>&1; tail -2 $OUT/times_$k.log)
done
python3 - <<'P'
import json, os
o = os.environ["OUT"]; t = {}
for k in "420":
    try:
        for r in json.load(open(f"{o}/times_{k}.json"))["results"]:
            if r["heads"] >= 32: t.setdefault((r["rows"], r["phase"], r["heads"], r["tokens"], r["keys"]), {})[k] = (r["us"], r["speedup"])
    except Exception as e: print(k, e)
for key, v in sorted(t.items(), key=str): print(*key, *(f"{k}: {u:.1f} {s:.2f}" for k, (u, s) in v.items()))
P
