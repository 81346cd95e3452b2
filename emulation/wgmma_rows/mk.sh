#!/bin/bash
cd /tmp/emu4 && python3 pre.py $1 >/dev/null && g++ -std=c++20 -O2 -fno-strict-aliasing -w -I/usr/local/cuda-13.0/include -I/tmp/emu4 -I/tmp/emu4/src main.cpp -o ${2:-emu} 2>&1 | grep -E "error|Error" | head -30
