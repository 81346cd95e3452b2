#include "emu.h"
#include "sparse_mla_wgmma_rows.cu"
using namespace mla;
static std::mt19937 gen(7);
static float normal() { static std::normal_distribution<float> d; return d(gen); }
int main(int argc, char** argv) {
  // args: format tokens heads w0 w1 splits sms copy_mode mma_mode seed slow0..3 lengths_mode spread
  auto arg = [&](int i, int d) { return i < argc ? atoi(argv[i]) : d; };
  const RowFormat f = arg(1, 2) == 2 ? RowFormat::kV4 : RowFormat::kV32;
  const int tokens = arg(2, 1), heads = arg(3, 32), w[2] = {arg(4, 64), arg(5, 0)}, splits = arg(6, 1), sms = arg(7, 1);
  emu::copy_mode = arg(8, 2), emu::mma_mode = arg(9, 2); gen.seed(arg(10, 1)); emu::rng.seed(arg(10, 1));
  for (int i = 0; i < 4; ++i) emu::slow[i] = arg(11 + i, 1);
  const int lm = arg(15, 0), spread = arg(16, 0); const float bmm1 = arg(17, 100) / 1000.f; const bool sinks = arg(18, 1); const int garbage = arg(19, 0);
  const bool v4 = f == RowFormat::kV4; const int dims = v4 ? 512 : 576, narrow = v4 ? 448 : 512, rowb = v4 ? 576 : 656, page = 8, pages = 60, count = page * pages;
  std::vector<uint8_t> pool[2]; std::vector<std::vector<double>> key[2];
  const int page_stride = page * (v4 ? 584 : 656) + 64;
  for (int s = 0; s < 2; ++s) {
    pool[s].assign(page_stride * pages + 64, 0xFF); key[s].assign(count, std::vector<double>(dims));
    uint8_t* base = (uint8_t*)(((uintptr_t)pool[s].data() + 63) & ~uintptr_t{63});
    for (int r = 0; r < count; ++r) {
      uint8_t* at = base + r / page * page_stride + r % page * rowb; uint8_t* sc = v4 ? base + r / page * page_stride + page * 576 + r % page * 8 : at + 512;
      const int e = spread ? -(int)(gen() % spread) : 0; float scales[7];
      for (int g = 0; g < (v4 ? 7 : 4); ++g) { if (v4) { int x = 127 - (int)(gen() % 4) + e; sc[g] = x; scales[g] = ldexpf(1, x - 127); } else { scales[g] = ldexpf(0.3f + (gen() % 1000) / 1000.f, e); memcpy(sc + 4 * g, &scales[g], 4); } }
      if (v4) sc[7] = 0xFF;
      for (int d = 0; d < narrow; ++d) { uint8_t b; do b = gen(); while ((b & 127) == 127 || (b >> 3 & 15) > 8); at[d] = b; key[s][r][d] = (double)emu::e4m3(b) * scales[d / (v4 ? 64 : 128)]; }
      for (int d = 0; d < 64; ++d) { uint16_t b = emu::to_bf(ldexpf(normal(), e)); memcpy(at + (v4 ? 448 : 528) + 2 * d, &b, 2); key[s][r][narrow + d] = emu::bf(b); }
    }
  }
  const int special = arg(20, 0);
  SparseMlaRows c = {}; c.format = f; c.tokens = tokens; c.heads = heads;
  const int qh = dims + 8, qt = heads * qh + 16, oh = 520, ot = heads * oh + 8;
  std::vector<uint16_t> q(tokens * qt + 16, 0x7FC0), out(tokens * ot + 16, 0x1234); 
  uint16_t* qb = (uint16_t*)(((uintptr_t)q.data() + 15) & ~uintptr_t{15}); uint16_t* ob = (uint16_t*)(((uintptr_t)out.data() + 15) & ~uintptr_t{15});
  for (int t = 0; t < tokens; ++t) for (int h = 0; h < heads; ++h) for (int d = 0; d < dims; ++d) qb[t * qt + h * qh + d] = emu::to_bf(normal());
  std::vector<int> idx[2], len[2]; std::vector<float> sink(heads), lse(tokens * heads, -77.f);
  for (auto& x : sink) x = normal();
  for (int s = 0; s < 2; ++s) {
    idx[s].resize(tokens * (w[s] + 3)); for (auto& x : idx[s]) x = gen() % count;
    if (garbage) for (auto& x : idx[s]) if (gen() % garbage == 0) { const int bad[] = {-1, -2, INT_MIN, INT_MAX, count}; x = bad[gen() % 5]; }
    len[s].resize(tokens); for (int t = 0; t < tokens; ++t) len[s][t] = lm == 0 ? w[s] : lm == 1 ? (int)(gen() % (w[s] + 1)) : lm == 2 ? (t % 3 == 0 ? 0 : t % 3 == 1 ? w[s] : 1) : (t % 2 ? -5 : w[s] + 9);
    c.sources[s] = {{(void*)(((uintptr_t)pool[s].data() + 63) & ~uintptr_t{63}), page_stride, rowb, Divisor(page), (uint32_t)count}, idx[s].data(), w[s] + 3, len[s].data(), 0, w[s]};
  }
  if (special & 16) { const int tk = arg(21, 0); const int col = arg(22, 0); int r = idx[0][tk * (w[0] + 3) + col]; for (int t = 0; t < tokens; ++t) if (t != tk) for (int j = 0; j < w[0]; ++j) if (idx[0][t * (w[0] + 3) + j] == r) idx[0][t * (w[0] + 3) + j] = -1;
    uint8_t* base = (uint8_t*)(((uintptr_t)pool[0].data() + 63) & ~uintptr_t{63}); base[r / page * page_stride + r % page * rowb + 5] = 127; key[0][r][5] = NAN; }
  c.q = qb; c.q_token_stride = qt; c.q_head_stride = qh; c.out = ob; c.out_token_stride = ot; c.out_head_stride = oh; c.tokens_per_length = 1;
   if (special & 1) for (int x = 0; x < 2; ++x) { c.sources[x].lengths = nullptr; for (auto& l : len[x]) l = w[x]; }
  if (special & 2) { c.tokens_per_length = Divisor(3); for (int x = 0; x < 2; ++x) { auto l = len[x]; for (int t = 0; t < tokens; ++t) len[x][t] = l[t / 3]; static std::vector<int> keep[2]; keep[x] = l; if (c.sources[x].lengths) c.sources[x].lengths = keep[x].data(); } }
  if ((special & 4) && !w[1]) { c.sources[1].indices = nullptr; c.sources[1].lengths = nullptr; c.sources[1].pool = c.sources[0].pool; c.sources[1].indices_stride = 0; }
  if (special & 8) for (auto& x : sink) x = 1000;
  c.sinks = sinks ? sink.data() : nullptr; c.bmm1 = bmm1; c.bmm2 = 1; c.lse = lse.data(); c.keep_outputs = false;
  if (launch_sparse_mla_wgmma_rows(c, splits, sms, 0)) { printf("launch failed\n"); return 1; }
  double err = 0, norm = 0, worst_lse = 0, rounding = 0; int bad = 0;
  if (special & 16) { const int t = arg(21, 0); int fine = 0; for (int h = 0; h < heads; ++h) { fine += !std::isnan(lse[t * heads + h]); for (int d = 0; d < 512; ++d) fine += !std::isnan(emu::bf(ob[t * ot + h * oh + d])); } printf("NaN: %d that are not\n", fine); }
  for (int t = 0; t < tokens; ++t) for (int h = 0; h < heads; ++h) {
    if ((special & 16) && t == arg(21, 0)) continue;
    std::vector<const std::vector<double>*> ks;
    for (int s = 0; s < 2; ++s) for (int j = 0; j < min(len[s][t], w[s]); ++j) { int i = idx[s][t * (w[s] + 3) + j]; if (i >= 0 && i < count) ks.push_back(&key[s][i]); }
    std::vector<double> sc; double m = -INFINITY;
    for (auto* k : ks) { double x = 0; for (int d = 0; d < dims; ++d) x += (*k)[d] * emu::bf(qb[t * qt + h * qh + d]); sc.push_back(x * bmm1); m = max(m, sc.back()); }
    double sum = 0; for (auto& x : sc) sum += exp(x - m);
    const double L = ks.empty() ? INFINITY : m + log(sum); const double total = ks.empty() ? 1 : sum + (sinks ? exp(sink[h] - m) : 0);
    if (!(fabs(lse[t * heads + h] - L) < 0.01 || lse[t * heads + h] == L)) { if (bad++ < 5) printf("lse token %d head %d: %g, is %g\n", t, h, lse[t * heads + h], L); } else if (!ks.empty()) worst_lse = max(worst_lse, fabs(lse[t * heads + h] - L));
    for (int d = 0; d < 512; ++d) {
      double o = 0; for (size_t j = 0; j < ks.size(); ++j) o += exp(sc[j] - m) * (*ks[j])[d]; o /= total;
      const double got = emu::bf(ob[t * ot + h * oh + d]); err += (got - o) * (got - o); norm += o * o; const double r = emu::bf(emu::to_bf(o)) - o; rounding += r * r;
      if (!(fabs(got - o) <= 0.02 * (1 + fabs(o)) * 4)) { if (bad++ < 5) printf("out token %d head %d dim %d: %g, is %g\n", t, h, d, got, o); }
    }
    for (int d = 512; d < 520; ++d) if (ob[t * ot + h * oh + d] != 0x1234) bad++;
  }
  const double e = sqrt(err / max(norm, 1e-300)), r = sqrt(rounding / max(norm, 1e-300));
  printf("format %d tokens %d heads %d keys %d+%d splits %d sms %d modes %d %d slow %d%d%d%d lengths %d spread %d: error %.3e (rounding %.3e, excess %.2e), lse %.1e, bad %d\n", v4 ? 584 : 656, tokens, heads, w[0], w[1], splits, sms, emu::copy_mode, emu::mma_mode, emu::slow[0], emu::slow[1], emu::slow[2], emu::slow[3], lm, spread, e, r, sqrt(max(0., e * e - r * r)), worst_lse, bad);
  return bad != 0;
}
