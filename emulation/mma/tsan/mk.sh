#!/bin/bash
# mk.sh csrc exe src
D=/tmp/emu5mma/tsan; cd $D
python3 pre.py $1 $3 && g++ -std=c++20 -O1 -march=native -fno-strict-aliasing -w -g -fsanitize=thread -I/usr/local/cuda-13.0/include -I$D -I$3 main.cpp -o $2 2>&1 | grep -E "error|undefined" | head
