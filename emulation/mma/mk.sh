#!/bin/bash
# mk.sh [csrc] [exe] [src dir] [more flags]
D=/tmp/emu5mma; cd $D; S=${3:-$D/src}
python3 pre.py ${1:-/work/wt-clusters/csrc} $S && g++ -std=c++20 -O3 -march=native -fno-strict-aliasing -fno-stack-protector -w ${@:4} -I/usr/local/cuda-13.0/include -I$D -I$S main.cpp -o ${2:-emu} 2>&1 | grep -E "error|Error|undefined" | head -30
