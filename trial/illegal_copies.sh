#!/usr/bin/env bash
# usage: illegal_copies.sh LIBRARY    finds what ptxas 13.0.88 can make and SM90 has not: a copy with a cache policy whose
# shared address has a uniform register. See NOTES.md.
set -uo pipefail
sass=$(cuobjdump -sass "$1") && grep -q LDGSTS <<<"$sass" || { echo "no SASS with copies in $1" >&2; exit 2; }
if grep -nE 'desc\[UR[0-9]*[13579]\]|LDGSTS.*\[R[0-9]+\+UR' <<<"$sass"; then exit 1; fi
echo "no illegal copies in $1"
