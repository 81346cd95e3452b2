set -e
export PATH=/work/cache/ci/vllm-dsv4-overlay/test-84dbcab0a64b8146/bin:$PATH
cd $1; chmod +x scripts/build-kernels.sh
VIRTUAL_ENV=/work/cache/ci/vllm-dsv4-overlay/test-84dbcab0a64b8146 NVCC_APPEND_FLAGS="-Xptxas -v" MLA_CUDA_ARCHS=90a nice scripts/build-kernels.sh $2 > $2.log 2>&1 || { tail -20 $2.log; exit 1; }
grep -E "Compiling entry.*m64_rows|spill|Used|C7510|serializ" $2.log | grep -A2 m64_rows | grep -v "^--" | cut -c1-150
