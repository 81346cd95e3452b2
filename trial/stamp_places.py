S, O, F = "csrc/m64_rows_scores.cuh", "csrc/sparse_mla_m64_rows.cu", "csrc/m64_rows_fetch.cuh"
for f in (S, O, F):
    sub(f, [("  using L = Layout<FORMAT>;\n  static constexpr bool kPacked" if f == S or f == O else "  using L = Layout<FORMAT>;\n  static constexpr bool kPacked", "  using L = Layout<FORMAT>;\n  using Base::stamp;\n  static constexpr bool kPacked")])
add(S, "      barrier_wait(q_full(), odd);\n", 20, False)
add(S, "      barrier_wait(q_full(), odd);\n", 21)
add(S, "      sync_threads(3, 128);\n", 22)
add(S, "        barrier_wait(full(slot), phases >> slot & 1);\n", 23, False)
add(S, "        barrier_wait(full(slot), phases >> slot & 1);\n", 24)
add(S, "        products_commit();\n", 25)
add(S, "        products_wait<0>();\n", 26)
_p = to / S; _s = _p.read_text(); _u = "barrier_wait(used(buffer), tile / 2 & 1 ^ 1);"
assert _s.count(_u) in (1, 3)
_p.write_text(_s.replace(_u, "stamp(27);" + _u + "stamp(28);"))
add(S, "        barrier_arrive(ready(buffer));\n", 29)
add(O, "        barrier_wait(ready(buffer), tile / 2 & 1);\n", 1, False)
add(O, "        barrier_wait(ready(buffer), tile / 2 & 1);\n", 2)
sub(O, [("          if (step > 0) products_wait<1>(), strict_wait(1 + half), put(fill, step - 1);\n          take(fill, step);\n",
 "          stamp(3);\n          if (step > 0) { products_wait<1>(); stamp(4); put(fill, step - 1); stamp(5); }\n          take(fill, step);stamp(7);\n"),
 ("        barrier_arrive(used(buffer));\n        put(fill, 3);\n", "        stamp(8);barrier_arrive(used(buffer));\n        put(fill, 3);stamp(9);\n"),
 ("      barrier_wait(raw_full(quarter), fill.entry & 1);\n", "      barrier_wait(raw_full(quarter), fill.entry & 1);stamp(6);\n"),
 ("          if (started) {\n            barrier_wait(q_read(), odd);\n", "          stamp(10);if (started) {\n            barrier_wait(q_read(), odd);stamp(11);\n"),
 ("        if (i >= p.whole) {\n          float4*", "        stamp(12);if (i >= p.whole) {\n          float4*"),
])
add(F, "        barrier_wait(raw_empty(quarter), entry & 1 ^ 1);\n", 40, False)
add(F, "        barrier_wait(raw_empty(quarter), entry & 1 ^ 1);\n", 41)
add(F, "            ask_for<FIRST>(x, mine, to_scales, there >> 16, 16);\n", 42)
add(F, "          prepare(x, bits, entry + is_first);\n", 43, False)
add(F, "          prepare(x, bits, entry + is_first);\n", 44)
add(F, "          copy_narrow<FIRST>(mine, bits, t * 16);\n", 48, False)
add(F, "          copy_narrow<FIRST>(mine, bits, t * 16);\n", 49)
add(F, "            barrier_wait(tail_empty(entry & 1), entry / 2 & 1 ^ 1);\n", 45, False)
add(F, "            barrier_wait(tail_empty(entry & 1), entry / 2 & 1 ^ 1);\n", 46)
add(F, "          if (!is_last) {\n", 50, False)
add(F, "      if (is_more) turn_to_rows();\n    }\n", 47, False)
sub(F, [("      if (is_more) turn_to_rows();\n    }\n", "      if (is_more) turn_to_rows();\nstamp(51);    }\n")])
