# mutations: name, file, from, to, extra options; each must be caught
import os,subprocess,sys,shutil
M=[
('no barrier in merge_halves','sparse_mla_mma.cu','sync_threads(3, kConsumerThreads);\n    if (group) return;','if (group) return;','mode=3'),
('rank r not r0 + r','sparse_mla_mma.cu','of_rank(smem_address(shared.rows) + i * 16, r0 + r)','of_rank(smem_address(shared.rows) + i * 16, r)','mode=0'),
('stats of r not r0 + r','sparse_mla_mma.cu','exp2_fast(shared.stats[r0 + r][0][row] - shift)','exp2_fast(shared.stats[r][0][row] - shift)','mode=0'),
('eight ranks only','sparse_mla_mma.cu','for (int r0 = 0; r0 < p.splits; r0 += 8)','for (int r0 = 0; r0 < 8; r0 += 8)','mode=0'),
('no correction of the second half','sparse_mla_mma.cu','other[h] = exp2_fast(their_maximum - shift);','other[h] = 1.f;','mode=3'),
('no correction of the first half','sparse_mla_mma.cu','mine[h] = exp2_fast(maximum[h] - shift), other','mine[h] = 1.f, other','mode=3'),
('shift of -inf','sparse_mla_mma.cu','const float shift = most == -INFINITY ? 0.f : most;','const float shift = most;','mode=3'),
('largest of the second forgotten','sparse_mla_mma.cu','largest[h] = fmaxf(largest[h], second.row_stat[2][g + h * 8]);','','mode=3'),
('group 1 writes too','sparse_mla_mma.cu','if (BLOCK == MmaBlock::kShared ? group == 0 :','if (BLOCK == MmaBlock::kShared ? group == 1 :','mode=3'),
('no sync at the end of attend','sparse_mla_mma.cu','shared.row_largest[g + h * 8][warp] = largest[h];\n    }\n    sync();','shared.row_largest[g + h * 8][warp] = largest[h];\n    }','mode=3'),
('halves of 0 and 1 alone','sparse_mla_mma.cu','turn == 0 ? 2 * blockIdx.x + group','turn == 0 ? blockIdx.x + group','mode=3'),
('relaxed arrive at the start left out','sparse_mla_mma.cu','if (merges) asm volatile("barrier.cluster.arrive.relaxed.aligned;");','','mode=0'),
('no last cluster barrier','sparse_mla_mma.cu','asm volatile("barrier.cluster.arrive.relaxed.aligned;\\n barrier.cluster.wait.aligned;" ::: "memory");\n  }','}','mode=0'),
('no second cluster barrier','sparse_mla_mma.cu','asm volatile("barrier.cluster.arrive.release.aligned;\\n barrier.cluster.wait.acquire.aligned;" ::: "memory");','','mode=0'),
('producers arrive once less','sparse_mla_mma.cu','for (int i = 0; i < 2; ++i)\n        asm volatile("barrier.cluster.wait','for (int i = 0; i < 1; ++i)\n        asm volatile("barrier.cluster.wait','mode=0'),
('no sync before telling','sparse_mla_mma.cu','sync_threads(1, S::kGroupThreads);\n    asm','asm','mode=0'),
('half: a lane of 16 keys prepares scales','mma_scores.cuh','if (lane < kKeysWarp) {','if (lane < 16) {','mode=1'),
('half: key of lane % 16','mma_scores.cuh','warp * kKeysWarp + lane % kKeysWarp','warp * kKeysWarp + lane % 16','mode=1'),
('half: second unit unchecked','mma_scores.cuh','fmaf(part[j][n][i], scales[n][i % 2].of_group(of), chains[0][n][i])','fmaf(part[j][n][i], scales[n][0].of_group(of), chains[0][n][i])','mode=1'),
('half: weights one block off','mma_values.cuh','put(weights.term[0][block / 2], high);','put(weights.term[0][block / 2 * (block != 7)], high);','mode=1'),
('lengths of the wrong item','scheduler.cuh','first = min(item % p.splits * share, all);','first = min(item % p.splits * share, all - 1);',''),
('consumers free a stage early','sparse_mla_mma.cu','add_values(stage, weights);\n      barrier_arrive(smem_address(&shared.empty[stage]));','barrier_arrive(smem_address(&shared.empty[stage]));\n      add_values(stage, weights);',''),
('producers do not wait','sparse_mla_mma.cu','barrier_wait(smem_address(&shared.empty[stage]), parity);','',''),
('copies not waited for','sparse_mla_mma.cu','copies_arrive(smem_address(&shared.full[stage]));','copies_arrive(smem_address(&shared.full[stage]) + 0 * stage); barrier_arrive(smem_address(&shared.full[stage]));',''),
('one buffer of weights','sparse_mla_mma.cu','buffer ^= 1;','',''),
('no sync after raise','sparse_mla_mma.cu','write_weights(s, weights, sum_tile);\n        sync();','write_weights(s, weights, sum_tile);',''),
('sort: direction','turns.cuh','(turn % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x)','(turn % 2 ? gridDim.x - blockIdx.x : blockIdx.x)','mode=2'),
('sink left out of merge','sparse_mla_mma.cu','float total = exp2_fast(sink - shift), value','float total = 0.f, value','mode=0'),
]
which=[int(x) for x in sys.argv[1].split(',')] if len(sys.argv)>1 else range(len(M))
for i in which:
    name,f,a,b,opt=M[i]; d=f'/tmp/emu5mma/mut'; shutil.rmtree(d,ignore_errors=True); shutil.copytree('/work/wt-clusters/csrc',d)
    s=open(f'{d}/{f}').read()
    if a not in s: print(f'{i} {name}: TEXT NOT FOUND',flush=True); continue
    open(f'{d}/{f}','w').write(s.replace(a,b))
    r=subprocess.run(['bash','mk.sh',d,'emu_mut','/tmp/emu5mma/msrc'],capture_output=True,text=True)
    if r.stdout.strip(): print(f'{i} {name}: DOES NOT COMPILE',r.stdout[:300],flush=True); continue
    try: r=subprocess.run(['./emu_mut','5000','300','seconds=8']+opt.split(),capture_output=True,text=True,timeout=60); out=r.stdout; rc=r.returncode
    except subprocess.TimeoutExpired as e: out=(e.stdout or b'').decode(); rc='timeout'
    bad=sum(int(l.split()[-9]) for l in out.split('\n') if l.startswith('SUM') and l.split()[-8]=='bad,') if 'SUM' in out else None
    fl=[l for l in out.split('\n') if 'FAIL' in l or 'token' in l and 'is' in l]
    n=sum(int(l.split('cases')[0].split()[-1]) for l in out.split('\n') if l.startswith('SUM'))
    print(f'{i} {name}: {"CAUGHT" if rc not in (0,) else "MISSED"} rc {rc} bad {bad} of {n}; {fl[0][:110] if fl else ""}',flush=True)
