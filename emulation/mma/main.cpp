#include "emu.h"
#include "sparse_mla_mma.cu"
#include <map>
#include <string>
using namespace mla;
// emu FIRST COUNT [key=value ...]: cases of these seeds, each at random but for what is given
static std::map<std::string, int> given;
static emu::Rng gen;
static float normal() { float u = ((gen() >> 8) + 0.5f) / 16777216.f, v = (gen() >> 8) / 16777216.f; return sqrtf(-2 * logf(u)) * cosf(6.2831853f * v); }
static std::string text;
static int pick(const char* name, std::vector<int> of) { int x = of[gen() % of.size()]; if (auto i = given.find(name); i != given.end()) x = i->second; text += std::string(" ") + name + "=" + std::to_string(x); return x; }
static int uniform(const char* name, int a, int b) { int x = a + gen() % (b - a + 1); if (auto i = given.find(name); i != given.end()) x = i->second; text += std::string(" ") + name + "=" + std::to_string(x); return x; }
struct Result { bool ok; double err, excess, lse, largest; std::string mode; };
template <typename T> struct Buf { T* p; size_t n; Buf(size_t n, int fill) : n(std::max<size_t>(n, 1)) { p = (T*)emu::guarded(this->n * sizeof(T), fill); } ~Buf() { emu::unguard(p, n * sizeof(T)); } T& operator[](size_t i) { return p[i]; } };
static const char* kFormats[] = {"E4M3", "BF16", "V4", "V32", "BF576"};
static const char* kModes[] = {"whole", "half", "paired", "shared"};

static Result run(uint64_t seed) {
  gen.seed(seed); emu::rng.seed(seed * 3 + 1); text.clear();
  const int fi = pick("format", {0, 1, 2, 2, 3, 4}); const RowFormat f = RowFormat(fi);
  const bool has_narrow = fi != 1 && fi != 4;
  std::vector<int> modes = {0}; if (has_narrow) modes = {0, 0, 2, 3, 3}; if (fi == 2) modes = {0, 1, 1, 2, 3, 3};
  const int mi = pick("mode", modes); const MmaBlock mode = MmaBlock(mi);
  int splits = pick("splits", {1, 1, 2, 3, 4, 5, 7, 8, 8, 9, 10, 11, 13, 15, 16, 16, 16}); if (mi == 2) splits = 1; if (mi == 3) splits = 2;
  const int heads = pick("heads_kind", {0, 0, 1, 2}) == 0 ? uniform("heads", 1, 16) : given.count("heads") ? given["heads"] : (text += " (many)", (int)(17 + gen() % 48));
  const int head_blocks = (heads + 15) / 16;
  const int tokens = mi == 2 ? uniform("tokens", 1, head_blocks > 1 ? 6 : 14) : uniform("tokens", 1, splits > 4 || head_blocks > 1 ? 2 : 4);
  const int sms = pick("sms", {1, 2, 3, 5});
  int w[2] = {pick("w0", {0, 1, 15, 16, 17, 31, 63, 64, 65, 100, 127, 128, 129, 200, 256, 257, 400, 640, 1000}), pick("w1", {0, 0, 1, 30, 64, 100, 128, 300, 512})};
  if (mi == 2 && head_blocks > 1) w[0] = min(w[0], 400);
  const int lm = pick("lengths", {0, 1, 1, 1, 2, 3, 4}), garbage = pick("garbage", {0, 0, 0, 2, 10, 1}), spread = pick("spread", {0, 0, 0, 10, 60}), order = pick("order", {0, 0, 1, 2});
  const float bmm1 = pick("bmm1", {1, 10, 44, 100, 1000}) / 1000.f; const int sinks_kind = pick("sinks", {0, 1, 1, 2, 3, 4});
  const int stats = pick("stats", {0, 1, 2, 2}), special = uniform("special", 0, 63), qkind = pick("q", {0, 0, 0, 1, 2});
  emu::copy_mode = pick("copy", {0, 1, 2, 2, 2}); emu::burst_mode = pick("burst", {0, 1, 1, 2}); emu::delay_blocks = pick("delay", {0, 1}); emu::random_slow = pick("random_slow", {0, 1});
  emu::slow_class = pick("slow_class", {-1, -1, 0, 1, 2}); emu::slow_by = pick("slow_by", {4, 30, 200}); emu::poison_random = pick("poison", {0, 1});
  const bool keep = pick("keep", {0, 1}), big = pick("big", {0, 0, 1}), with_nan = pick("nan", {0, 0, 0, 0, 1});
  const bool v4 = fi == 2, v32 = fi == 3; const int dims = fi == 3 || fi == 4 ? 576 : 512, narrow = fi == 1 || fi == 4 ? 0 : v4 ? 448 : 512, wide = dims - narrow;
  const int rowb = v4 ? 576 : fi == 0 ? 512 : fi == 1 ? 1024 : v32 ? 656 : 1152, paged = v4 ? 584 : rowb, page = (int[]){8, 1, 7, 64}[gen() % 4], pages = 240 / page + 1, count = page * pages;
  // a page begins where 16 bytes do, whatever its rows' scales take
  const int page_stride = (page * paged + 15) / 16 * 16 + 16 * (gen() % 5);
  const bool fp8q = fi == 0 && (special & 32);
  std::vector<Buf<uint8_t>*> pool; std::vector<std::vector<double>> key[2];
  for (int s = 0; s < 2; ++s) {
    pool.push_back(new Buf<uint8_t>(page_stride * pages, 0xFF)); key[s].assign(count, std::vector<double>(dims));
    for (int r = 0; r < count; ++r) {
      uint8_t* at = pool[s]->p + r / page * page_stride + r % page * rowb; uint8_t* sc = v4 ? pool[s]->p + r / page * page_stride + page * 576 + r % page * 8 : at + 512;
      const int e = spread ? -(int)(gen() % spread) : 0; float scales[8] = {1, 1, 1, 1, 1, 1, 1, 1};
      if (v4 || v32) for (int g = 0; g < (v4 ? 7 : 4); ++g) { if (v4) { int x = 127 - (int)(gen() % 4) + e; sc[g] = x; scales[g] = ldexpf(1, x - 127); } else { scales[g] = ldexpf(0.3f + (gen() % 1000) / 1000.f, e); memcpy(sc + 4 * g, &scales[g], 4); } }
      if (v4) sc[7] = 0xFF;
      for (int d = 0; d < narrow; ++d) { uint8_t b; do b = gen(); while ((b & 127) == 127 || (!big && (b >> 3 & 15) > 8)); at[d] = b; key[s][r][d] = (double)emu::e4m3(b) * (v4 ? scales[d / 64] : v32 ? scales[d / 128] : 1); }
      for (int d = 0; d < wide; ++d) { uint16_t b = emu::to_bf(ldexpf(normal(), e + 5 * big)); memcpy(at + (v4 ? 448 : v32 ? 528 : 0) + 2 * d, &b, 2); key[s][r][narrow + d] = emu::bf(b); }
    }
  }
  SparseMlaRows c = {}; c.format = f; c.tokens = tokens; c.heads = heads;
  const int qh = dims + 16, qt = heads * qh + 16, oh = 520, ot = heads * oh + 8;
  Buf<uint16_t> q(tokens * qt, 0x7F), out(tokens * ot, 0x5A); Buf<uint8_t> q8(tokens * qt, 0x7F);
  std::vector<double> qv(tokens * qt);
  const float qscale = qkind == 1 ? ldexpf(1, 20) : qkind == 2 ? ldexpf(1, -30) : 1; float bm = bmm1 / qscale / (big ? 60 : 1);
  for (int t = 0; t < tokens; ++t) for (int h = 0; h < heads; ++h) for (int d = 0; d < dims; ++d) {
    const int at = t * qt + h * qh + d;
    if (fp8q) { uint8_t b; do b = gen(); while ((b & 127) == 127 || (b >> 3 & 15) > 8); q8[at] = b; qv[at] = emu::e4m3(b); }
    else { q[at] = emu::to_bf(normal() * qscale); qv[at] = emu::bf(q[at]); }
  }
  if (fp8q) bm = bmm1 / (big ? 60 : 1);
  Buf<float> sink(heads, 0), lse(tokens * heads, 0x5A), most(tokens * heads, 0x5A), bt1(1, 0), bt2(1, 0);
  for (int h = 0; h < heads; ++h) { float x = normal() * 3; if (sinks_kind == 2) x = (float[]){INFINITY, -INFINITY, 1e30f, -1e30f, 3.4e38f, -3.4e38f, x, 1000.f}[gen() % 8]; if (sinks_kind == 3) x = -INFINITY; if (sinks_kind == 4) x = 1000; sink[h] = x; }
  std::vector<Buf<int>*> idx, len; std::vector<int> lens[2]; const int offset[2] = {0, (special & 1) ? 128 : 0}; const int per = (special & 2) ? 3 : 1; const int istride[2] = {w[0] + (int)(gen() % 4), w[1] + (int)(gen() % 4)};
  for (int s = 0; s < 2; ++s) {
    idx.push_back(new Buf<int>(tokens * istride[s], 0x7F)); len.push_back(new Buf<int>((tokens + per - 1) / per, 0)); lens[s].resize(tokens);
    for (int t = 0; t < tokens; ++t) for (int j = 0; j < w[s]; ++j) { int x = gen() % count; if (garbage && (garbage == 1 ? gen() % 20 != 0 : gen() % garbage == 0)) x = (int[]){-1, -2, INT_MIN, INT_MAX, count}[gen() % 5]; (*idx[s])[t * istride[s] + j] = x; }
    for (int i = 0; i < (int)len[s]->n; ++i) { const int o = offset[s]; (*len[s])[i] = lm == 0 ? w[s] + o : lm == 1 ? (int)(gen() % (w[s] + o + 1)) : lm == 2 ? (gen() % 3 == 0 ? o : gen() % 2 ? w[s] + o : 1 + o) : lm == 3 ? (gen() % 2 ? -5 : w[s] + 9) : (int)(gen() % 3); }
    for (int t = 0; t < tokens; ++t) lens[s][t] = (special & 4) ? w[s] : std::max(0, std::min((*len[s])[t / per] - offset[s], w[s]));
    c.sources[s] = {{pool[s]->p, page_stride, rowb, Divisor(page), (uint32_t)count}, idx[s]->p, istride[s], (special & 4) ? nullptr : len[s]->p, offset[s], w[s]};
  }
  if (special & 8) { c.second_needs_first = true; if (!(special & 4)) for (int t = 0; t < tokens; ++t) if ((*len[0])[t / per] <= 0) lens[1][t] = 0; }
  if (!w[1] && (gen() & 1)) { c.sources[1].indices = nullptr; c.sources[1].pool = c.sources[0].pool; c.sources[1].indices_stride = 0; }
  // order of scores: rising or falling, so that maxima are raised often or never (by what q makes of the rows: sort indices by score of head 0)
  if (order) for (int t = 0; t < tokens; ++t) for (int s = 0; s < 2; ++s) {
    const auto score = [&](int i) { if ((unsigned)i >= (unsigned)count) return -1e30; double x = 0; for (int d = 0; d < dims; ++d) x += key[s][i][d] * qv[t * qt + d]; return x; };
    std::vector<std::pair<double, int>> v; for (int j = 0; j < w[s]; ++j) { int i = (*idx[s])[t * istride[s] + j]; v.push_back({score(i), i}); }
    std::stable_sort(v.begin(), v.end(), [&](auto& a, auto& b) { return order == 1 ? a.first < b.first : a.first > b.first; });
    for (int j = 0; j < w[s]; ++j) (*idx[s])[t * istride[s] + j] = v[j].second;
  }
  int nan_s = -1, nan_r = -1;
  if (with_nan) { std::vector<std::pair<int, int>> used; for (int s = 0; s < 2; ++s) for (int t = 0; t < tokens; ++t) for (int j = 0; j < lens[s][t]; ++j) { int i = (*idx[s])[t * istride[s] + j]; if (i >= 0 && i < count) used.push_back({s, i}); }
    if (!used.empty()) { auto [s, r] = used[gen() % used.size()]; nan_s = s, nan_r = r; uint8_t* at = pool[s]->p + r / page * page_stride + r % page * rowb; const int d = gen() % dims;
      if (d < narrow) at[d] = 0x7F; else { uint16_t b = 0x7FC0; memcpy(at + (v4 ? 448 : v32 ? 528 : 0) + 2 * (d - narrow), &b, 2); } key[s][r][d] = NAN; } }
  c.q = fp8q ? (void*)q8.p : (void*)q.p; c.q_is_fp8 = fp8q; c.q_token_stride = qt; c.q_head_stride = qh; c.out = out.p; c.out_token_stride = ot; c.out_head_stride = oh; c.tokens_per_length = Divisor(per);
  c.sinks = sinks_kind ? sink.p : nullptr; float bmm2 = gen() & 1 ? 1.f : 0.75f; c.bmm1 = bm, c.bmm2 = bmm2;
  if (special & 16) bt1[0] = bm, bt2[0] = bmm2, c.bmm1_tensor = bt1.p, c.bmm2_tensor = bt2.p, c.bmm1 = c.bmm2 = NAN;
  c.lse = stats ? lse.p : nullptr; c.max_logits = stats == 2 ? most.p : nullptr; c.keep_outputs = keep;
  emu::on_fail = [seed](const char* what) { printf("seed %lu:%s\n", seed, text.c_str()); };
  Result r{true, 0, 0, 0, 0, std::string(kFormats[fi]) + " " + kModes[mi] + (mi <= 1 ? splits == 1 ? " 1" : splits <= 8 ? " 2-8" : " 9-16" : "")};
  if (launch_sparse_mla_mma(c, mode, splits, sms, 0)) emu::fail("launch failed");
  double err = 0, norm = 0, rounding = 0; int bad = 0;
  const auto wrong = [&](const char* what, int t, int h, int d, double got, double is) { if (bad++ == 0) printf("seed %lu:%s\n", seed, text.c_str()); if (bad < 6) printf("   %s token %d head %d dim %d: %g, is %g\n", what, t, h, d, got, is); };
  std::vector<double> o(512);
  for (int t = 0; t < tokens; ++t) for (int h = 0; h < heads; ++h) {
    std::vector<const double*> ks; for (int s = 0; s < 2; ++s) for (int j = 0; j < lens[s][t]; ++j) { int i = (*idx[s])[t * istride[s] + j]; if (i >= 0 && i < count) ks.push_back(key[s][i].data()); }
    if (nan_s >= 0) { bool has = false; for (int j = 0; j < lens[nan_s][t]; ++j) has |= (*idx[nan_s])[t * istride[nan_s] + j] == nan_r;
      if (has) { for (int d = 0; d < 512; ++d) if (!std::isnan(emu::bf(out[t * ot + h * oh + d]))) { wrong("NaN out", t, h, d, emu::bf(out[t * ot + h * oh + d]), NAN); break; } if (stats && !std::isnan(lse[t * heads + h])) wrong("NaN lse", t, h, 0, lse[t * heads + h], NAN); continue; } }
    std::vector<double> sc; double m = -INFINITY; const double* qq = &qv[t * qt + h * qh];
    for (auto* k : ks) { double x = 0; for (int d = 0; d < dims; ++d) x += k[d] * qq[d]; sc.push_back(x * bm); m = std::max(m, sc.back()); }
    const double sk = sinks_kind ? sink[h] : -INFINITY, top = std::max(m, sk); double sum = 0, keys = 0; o.assign(512, 0);
    if (top == INFINITY) sum = 1, keys = 1; 
    for (size_t j = 0; j < ks.size(); ++j) { const double x = top == INFINITY ? 0 : exp(sc[j] - top); sum += x; for (int d = 0; d < 512; ++d) o[d] += x * ks[j][d]; }
    if (top != INFINITY && sk > -INFINITY) sum += exp(sk - top);
    double L = INFINITY; if (!ks.empty()) { double s2 = 0; for (auto x : sc) s2 += exp(x - m); L = m + log(s2); }
    if (stats) { const double g = lse[t * heads + h]; const double tol = 2e-5 * std::max(1., fabs(L)); if (std::isinf(L) ? g != L : !(fabs(g - L) <= tol)) wrong("lse", t, h, 0, g, L); else if (!std::isinf(L)) r.lse = std::max(r.lse, fabs(g - L) / std::max(1., fabs(L))); }
    if (stats == 2) { const double g = most[t * heads + h]; if (std::isinf(m) ? g != m : !(fabs(g - m) <= 2e-5 * std::max(1., fabs(m)))) wrong("largest", t, h, 0, g, m); else if (!std::isinf(m)) r.largest = std::max(r.largest, fabs(g - m) / std::max(1., fabs(m))); }
    double he = 0, hn = 0;
    for (int d = 0; d < 512; ++d) {
      const double want = sum > 0 ? o[d] / sum * bmm2 : 0, got = emu::bf(out[t * ot + h * oh + d]); const double rr = emu::bf(emu::to_bf(want)) - want;
      he += (got - want) * (got - want); hn += want * want; rounding += rr * rr;
      if (!std::isfinite(got) || (want == 0 && got != 0)) wrong("out", t, h, d, got, want);
    }
    if (std::isfinite(he) && sqrt(he) > 0.006 * sqrt(hn) + 1e-30) wrong("row of out, relative", t, h, 0, sqrt(he / hn), 0);
    err += he; norm += hn;
    for (int d = 512; d < 520; ++d) if (out[t * ot + h * oh + d] != 0x5A5A) wrong("beyond", t, h, d, 0, 0);
  }
  for (int t = 0; t < tokens; ++t) for (int d = 0; d < 8; ++d) if (out[t * ot + heads * oh + d] != 0x5A5A) wrong("beyond token", t, 0, d, 0, 0);
  uint32_t poison; memset(&poison, 0x5A, 4);
  for (int i = 0; i < tokens * heads; ++i) { if (!stats && memcmp(&lse[i], &poison, 4)) wrong("lse touched", i, 0, 0, 0, 0); if (stats < 2 && memcmp(&most[i], &poison, 4)) wrong("largest touched", i, 0, 0, 0, 0); }
  r.err = sqrt(err / std::max(norm, 1e-300)); const double ro = sqrt(rounding / std::max(norm, 1e-300)); r.excess = sqrt(std::max(0., r.err * r.err - ro * ro)); r.ok = !bad;
  for (auto* x : pool) delete x; for (auto* x : idx) delete x; for (auto* x : len) delete x;
  return r;
}
int main(int argc, char** argv) {
  const uint64_t first = atoll(argv[1]); const int n = atoi(argv[2]); bool verbose = false;
  for (int i = 3; i < argc; ++i) { std::string s = argv[i]; auto e = s.find('='); if (e == s.npos) verbose = true; else given[s.substr(0, e)] = atoi(s.c_str() + e + 1); }
  struct Sum { int n = 0, bad = 0; double err = 0, excess = 0, lse = 0, largest = 0; }; std::map<std::string, Sum> all; int bad = 0; const time_t begin = time(0);
  for (int i = 0; i < n && (!given.count("seconds") || time(0) - begin < given["seconds"]); ++i) {
    Result r = run(first + i); Sum& s = all[r.mode]; ++s.n; s.bad += !r.ok; bad += !r.ok; s.err = std::max(s.err, r.err); s.excess = std::max(s.excess, r.excess); s.lse = std::max(s.lse, r.lse); s.largest = std::max(s.largest, r.largest);
    if (verbose) printf("%s %lu:%s: %s error %.3e excess %.1e lse %.1e largest %.1e mmas %lu grid %d\n", r.mode.c_str(), first + i, text.c_str(), r.ok ? "ok" : "BAD", r.err, r.excess, r.lse, r.largest, emu::mmas, emu::last_grid);
    fflush(stdout);
  }
  for (auto& [m, s] : all) printf("SUM %-18s %5d cases %3d bad, error %.2e excess %.2e lse %.1e largest %.1e\n", m.c_str(), s.n, s.bad, s.err, s.excess, s.lse, s.largest);
  return bad != 0;
}
