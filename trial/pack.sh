cd /tmp/vllm-bundle-0.33.0; rm -rf /work/main/.bundle33; mkdir -p /work/main/.bundle33
tar -cf - site | nice -n 15 xz -2 -T2 | split -b 46MB -d -a 2 - part.
i=0; for p in part.*; do mkdir -p /work/main/.bundle33/b$i; mv $p /work/main/.bundle33/b$i/; i=$((i+1)); done
cat > /work/main/.bundle33/b0/unpack.sh <<'U'
set -euo pipefail
mkdir -p "$2"; cat "$1"/part.* | xz -dc -T0 | tar -C "$2" -xf -
n=/opt/torch/.venv/lib/python3.12/site-packages/nvidia
echo "export PYTHONPATH=$2/site:$2/site/nvidia_cutlass_dsl/python_packages:$2/site/nvidia_cutlass_dsl/dsl_packages LD_LIBRARY_PATH=$2/site/nvidia/nccl/lib:$(ls -d $n/*/lib $n/*/*/lib 2>/dev/null | tr '\n' ':')"
U
du -sm /work/main/.bundle33 > pack.done
