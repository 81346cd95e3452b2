#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include "/work/wt-kernels/csrc/sparse_mla_sm90.cu"
namespace mla {
static int at_once_value, asked, asked_size; static MmaBlock asked_block; 
int mma_clusters(RowFormat f, MmaBlock b, int size, int) { ++asked; asked_size = size; asked_block = b; if (size < 9 || size > 16) { printf("asked of %d\n", size); exit(1); } if (b == MmaBlock::kHalf && f != RowFormat::kV4) exit(2); return at_once_value; }
cudaError_t launch_sparse_mla_mma(const SparseMlaRows&, MmaBlock, int, int, cudaStream_t) { return cudaSuccess; }
cudaError_t launch_sparse_mla_wgmma(const SparseMla&, int, bool, int, cudaStream_t) { return cudaSuccess; }
cudaError_t launch_sparse_mla_m64(const SparseMla&, int, cudaStream_t) { return cudaSuccess; }
cudaError_t launch_sparse_mla_wgmma_rows(const SparseMlaRows&, int, int, cudaStream_t) { return cudaSuccess; }
cudaError_t launch_sparse_mla_m64_rows(const SparseMlaRows&, const M64Division&, int, cudaStream_t) { return cudaSuccess; }
}
using namespace mla;
int main() {
  long n = 0, bad = 0; std::map<std::string, long> seen;
  const char* fs[] = {"E4M3", "BF16", "V4", "V32", "BF576"}; const char* ms[] = {"whole", "half", "paired", "shared"};
  for (int sms : {1, 2, 3, 16, 66, 78, 114, 132, 144}) for (int f = 0; f < 5; ++f) for (int at : {0, 1, 2, 4, 5, 7, 8, 9, 14, 16}) for (int blocks = 1; blocks <= 420; ++blocks) for (int columns = 0; columns <= 2600; columns += columns < 300 ? 1 : columns < 1200 ? 32 : 63) {
    at_once_value = at; asked = 0; Gpu g; g.sms = sms; const MmaDivision d(RowFormat(f), blocks, columns, g);
    ++n; const bool wide = f == 1 || f == 4; const int b = (int)d.block; const char* why = nullptr;
    if (d.splits < 1 || d.splits > 16) why = "splits";
    if (d.splits > 8 && (asked != 1 || asked_size != d.splits || asked_block != d.block || blocks > at)) why = "a cluster that was not asked for";
    if (b == 1 && f != 2) why = "half"; if (b >= 2 && wide) why = "wide"; if (b == 2 && d.splits != 1) why = "paired splits";
    if (b == 3 && (d.splits != 2 || blocks > sms)) why = "shared";
    if (b <= 1 && d.splits > 1 && d.splits <= 8 && (long)blocks * d.splits > sms) why = "more blocks than SMs";
    if (b <= 1 && d.splits > 1 && (columns + (wide || f == 2 ? 64 : 128) - 1) / (wide || f == 2 ? 64 : 128) < d.splits) why = "more splits than tiles";
    // shares are rounded up to 16 keys: blocks without keys
    const int share = ((columns + d.splits - 1) / d.splits + 15) / 16 * 16;
    if (d.splits > 1 && (long)share * (d.splits - 1) >= columns) { ++seen["  a split has no keys at full length"]; static int p = 0; if (p++ < 4 && columns) printf("empty split: %s %s blocks %d columns %d splits %d share %d\n", fs[f], ms[b], blocks, columns, d.splits, share); }
    const int stage = b == 1 || b >= 2 || wide ? 64 : 128; if (b <= 1 && d.splits > 1 && f == 2 && b == 1 && share > 128) why = "half with more than two tiles";
    ++seen[std::string(fs[f]) + " " + ms[b] + (d.splits > 8 ? " 9-16" : d.splits > 2 ? " 3-8" : d.splits == 2 ? " 2" : " 1")];
    if (why && bad++ < 20) printf("BAD %s: format %s sms %d blocks %d columns %d at_once %d: %s splits %d\n", why, fs[f], sms, blocks, columns, at, ms[b], d.splits);
  }
  printf("%ld cases, %ld bad\n", n, bad); for (auto& [k, v] : seen) printf("%s: %ld\n", k.c_str(), v);
  for (auto [f, blocks, columns] : {std::tuple{2, 1, 256}, {2, 1, 640}, {2, 1, 1280}, {2, 1, 2176}, {2, 8, 640}, {2, 8, 1152}, {2, 12, 640}, {2, 33, 640}, {2, 34, 640}, {2, 50, 640}, {2, 50, 256},{2, 66, 640}, {2, 66, 192}, {2, 67, 640}, {2, 132, 640}, {2, 133, 640}, {2,4,64},{2,4,0}, {3, 1, 2048}, {3, 1, 1024}, {3, 7, 2048}, {3, 8, 2048}, {3, 50, 2048}, {0, 1, 640}, {0, 1, 1152},{0, 1, 2176}, {1, 1, 640}, {1, 7, 640}, {1, 8, 640}, {4, 100, 2048}, {4, 133, 2048}}) {
    at_once_value = 7; Gpu g; g.sms = 132; const MmaDivision d(RowFormat(f), blocks, columns, g); printf("132 SMs, 7 at once: %s blocks %d columns %d: %s, splits %d\n", fs[f], blocks, columns, ms[(int)d.block], d.splits);
  }
}
