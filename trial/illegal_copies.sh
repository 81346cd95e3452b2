#!/usr/bin/env bash
# Instructions that ptxas 13.0.88 can make and SM90 has not: a copy with a cache policy whose shared address has a uniform register.
cuobjdump -sass "$1" | grep -nE 'desc\[UR[0-9]*[13579]\]|LDGSTS.*\[R[0-9]+\+UR' && exit 1
echo "no illegal copies in $1"
