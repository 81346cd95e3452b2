cd /tmp/b33
grep -vE '^\s*#' lock.txt | grep -vE '^(torchaudio|torchcodec|tokenspeed-triton|nvidia-(cublas|cuda-|cudnn-cu13|cufft|cufile|curand|cusolver|cusparse=|nvjitlink|nvshmem|nvtx|nvvm)|nvidia-cutlass-dsl-libs-cu12|cuda-toolkit|flashinfer-cubin|opencv-python-headless|llvmlite|numba|numpy|grpcio|ml-dtypes|pillow|networkx|sympy|scipy)' > want.txt
platforms=(); for n in 39 38 37 36 35 34 33 32 31 30 29 28 27 26 25 24 23 22 21 20 19 18 17 16 15 14 12 5; do platforms+=(--platform "manylinux_2_${n}_x86_64"); done
mkdir -p wheels
nice python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64 -d wheels -r want.txt > dl.log 2>&1
echo EXIT $? >> dl.log
