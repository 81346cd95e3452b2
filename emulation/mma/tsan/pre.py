import re,sys,os
SRC=sys.argv[1] if len(sys.argv)>1 else '/work/wt-clusters/csrc'; DST=sys.argv[2] if len(sys.argv)>2 else '/tmp/emu5mma/src'
os.makedirs(DST,exist_ok=True)
files="sm90_ptx.cuh sm90_wgmma.cuh rows.cuh scheduler.cuh turns.cuh mma_shape.cuh mma_scores.cuh mma_values.cuh sparse_mla_mma.cu sparse_mla_rows.h sparse_mla_sm90.h".split()
# other: abort (of the other kernels)
B={
'evict_first':'{ return 0; }','copy16':'{ emu::copy(to, from, bytes, 16); }','copy8':'{ emu::copy(to, from, bytes, 8); }',
'exp2_fast':'{ return emu::ex2(x); }','e4m3_low':'{ return emu::e4m3x2(v); }','e4m3_high':'{ return emu::e4m3x2(v >> 16); }',
'scaled_half':'{ return emu::mul_half2(x, by); }',
'touch':'{}','wait_for_previous':'{}',
'configure':'{ return cudaSuccess; }','clusters_at_once':'{ *found = 8; return cudaSuccess; }',
'launch_kernel':'{ return emu::launch<KERNEL>(p, blocks, threads, shared_bytes, cluster); }','launch_overlapping':'{ abort(); }',
'barrier_init':'{ emu::bar_init(barrier, count); }','barrier_arrive':'{ emu::bar_arrive(barrier); }',
'barrier_wait':'{ emu::bar_wait(barrier, parity); }','sync_threads':'{ emu::named(id, threads, false); }',
'sync_any':'{ return emu::named(id, threads, mine); }','fence_async':'{}','copies_arrive':'{ emu::copies_arrive(barrier); }',
'copies_wait':'{ abort(); }','ldmatrix':'{ abort(); }','stmatrix_transposed':'{ abort(); }','stmatrix':'{ abort(); }','transposed8':'{ abort(); }',
'products_begin':'{ abort(); }','products_commit':'{ abort(); }','products_wait':'{ abort(); }','give_registers':'{}','take_registers':'{}','hold':'{}',
'of_rank':'{ return emu::of_rank(address, rank); }','write_remote':'{ memcpy(emu::remote(to, 4), &x, 4); }',
'read_remote':'{ uint4 r; memcpy(&r, emu::remote(from, 16), 16); return r; }','multiply':'{ emu::mma<HALF>(c, a, b0, b1); }',
}
ALWAYS={'launch_kernel','hold','configure','clusters_at_once','scaled_half','multiply'}
def body_end(s,i):
    d=0
    while True:
        if s[i]=='{': d+=1
        if s[i]=='}':
            d-=1
            if d==0: return i+1
        i+=1
left=0
for f in files:
    s=open(os.path.join(SRC,f)).read()
    s=re.sub(r'//.*','',s)
    s=re.sub(r'#define MLA_MMA\(type\)(.*\\\n)*.*\n','',s)
    def cluster(m):
        out=''
        for part in m.group(1).replace('\\n','').split(';'):
            part=part.strip()
            if not part: continue
            if part.startswith('barrier.cluster.arrive'): assert part.endswith('.aligned'); out+='emu::cluster_arrive(%s); ' % ('true' if 'relaxed' in part else 'false')
            elif part.startswith('barrier.cluster.wait'): assert part.endswith('.aligned'); out+='emu::cluster_wait(); '
            else: raise Exception(part)
        return '{ '+out+'}'
    s=re.sub(r'asm volatile\("(barrier\.cluster[^"]*)"[^;]*;',cluster,s)
    s=re.sub(r'asm volatile\("prefetch.global.L2[^;]*;"[^;]*;','(void)at;',s)
    s=re.sub(r'asm volatile\("" : [^;]*;','',s)
    s=re.sub(r'asm volatile\("fence.mbarrier_init[^;]*;"[^;]*;','',s)
    s=re.sub(r'extern __shared__ __align__\(\d+\) uint8_t smem\[\];','uint8_t* const smem = emu::me->block->smem;',s)
    s=s.replace('__CUDA_ARCH_FEAT_SM90_ALL','EMU').replace('(const __grid_constant__ RowParams p)','(const RowParams p)')
    out='';i=0
    for m in list(re.finditer(r'\b(\w+)\(([^;{}]*?)\)\s*(const\s*)?\{',s)):
        if m.start()<i: continue
        n=m.group(1)
        if n not in B: continue
        pre=s[max(0,m.start()-60):m.start()]
        if '__forceinline__' not in pre and 'cudaError_t ' not in pre: continue
        st=m.end()-1; e=body_end(s,st); body=s[st:e]
        if 'asm' not in body and n not in ALWAYS: continue
        out+=s[i:st]+B[n]; i=e
    s=out+s[i:]
    s=s.replace('config.gridDim','config_gridDim').replace('config.blockDim','config_blockDim').replace('config_gridDim = blocks;','').replace('config_blockDim = threads;','').replace('return cudaLaunchKernelEx(&config, kernel, p);','return cudaSuccess;')
    if 'asm' in s: left+=1; print(f,[l for l in s.split('\n') if 'asm' in l][:8])
    open(os.path.join(DST,f),'w').write(s)
sys.exit(left!=0)
