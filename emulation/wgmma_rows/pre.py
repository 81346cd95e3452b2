import re,sys,os
SRC=sys.argv[1] if len(sys.argv)>1 else '/work/wt-heads32/csrc'; DST='/tmp/emu4/src'
files="sm90_ptx.cuh sm90_wgmma.cuh rows.cuh scheduler.cuh turns.cuh wgmma_block.cuh wgmma_rows_block.cuh wgmma_rows_fetch.cuh wgmma_rows_scores.cuh sparse_mla_wgmma_rows.cu sparse_mla_rows.h sparse_mla_sm90.h".split()
B={ # function name -> body
'evict_first':'{ return 0; }',
'copy16':'{ emu::copy(to, from, bytes, 16); }',
'copy8':'{ emu::copy(to, from, bytes, 8); }',
'exp2_fast':'{ return exp2f(x); }',
'e4m3_low':'{ return emu::e4m3x2(v); }',
'e4m3_high':'{ return emu::e4m3x2(v >> 16); }',
'scaled_bf16':'{ return emu::scaled_bf16(x, power); }',
'larger_magnitudes':'{ return emu::larger(x, y); }',
'scaled_to_half':'{ return emu::scaled_to_half(x, power); }',
'touch':'{}','clusters_at_once':'{ return 8; }','configure':'{ return cudaSuccess; }','wait_for_previous':'{}','launch_kernel':'{ return emu::launch<KERNEL>(p, blocks, threads, shared_bytes, cluster); }',
'launch_overlapping':'{ abort(); }',
'barrier_init':'{ emu::bar_init(barrier, count); }','barrier_arrive':'{ emu::bar_arrive(barrier); }',
'barrier_wait':'{ emu::bar_wait(barrier, parity); }','sync_threads':'{ emu::named(id, threads, false); }',
'sync_any':'{ return emu::named(id, threads, mine); }','fence_async':'{}','copies_arrive':'{ abort(); }',
'copies_wait':None,'copies_commit':'{ emu::commit(); }','ldmatrix':'{ emu::ldmatrix(r, from); }',
'stmatrix_transposed':'{ emu::stmatrix_t(to, a, b, c, d); }','stmatrix':'{ abort(); }','transposed8':'{ abort(); }',
'products_begin':'{ emu::wg_fence(); }','products_commit':'{ emu::wg_commit(); }','products_wait':'{ emu::wg_wait(PENDING); }',
'give_registers':'{}','take_registers':'{}','hold':'{}',
'product':None,'bf16_product':'{ emu::wgmma<true>(d, a, b, ADD); }','prefetch_q':'{}','lane_again':'{ return lane; }',
}
def body_end(s,i):
    d=0
    while True:
        c=s[i]
        if c=='{': d+=1
        if c=='}':
            d-=1
            if d==0: return i+1
        i+=1
for f in files:
    s=re.sub(r'//.*','',open(os.path.join(SRC,f)).read())
    s=re.sub(r'asm volatile\("" : [^;]*;','',s)
    s=re.sub(r'asm volatile\("mov.u32 %0, %%laneid;"[^;]*;','lane = emu::me->tid % 32;',s)
    s=re.sub(r'asm volatile\("fence.mbarrier_init[^;]*;"[^;]*;','',s)
    s=s.replace('extern __shared__ __align__(1024) uint8_t smem[];','uint8_t* const smem = emu::smem();')
    s=s.replace('__CUDA_ARCH_FEAT_SM90_ALL','EMU')
    s=s.replace('(const __grid_constant__ RowParams p)','(const RowParams p)')
    # function bodies with asm
    out='';i=0
    for m in list(re.finditer(r'\b(\w+)\(([^;{}]*?)\)\s*(const\s*)?\{',s)):
        if m.start()<i: continue
        n=m.group(1)
        if n not in B: continue
        # must be a definition: preceded by type
        pre=s[max(0,m.start()-60):m.start()]
        if '__forceinline__' not in pre and 'cudaError_t ' not in pre and n != 'clusters_at_once': continue
        st=m.end()-1; e=body_end(s,st); body=s[st:e]
        if 'asm' not in body and n not in('launch_kernel','hold','product','clusters_at_once','configure'): continue
        b=B[n]
        if n=='copies_wait': b='{ emu::wait_group(PENDING); }' if 'PENDING' in body else '{ emu::wait_group(0); }'
        if n=='product':
            b='{ emu::wgmma<false>(d, a, b_descriptor, ADD); }' if 'a)[4]' in m.group(2) and '(&d)[16]' in m.group(2) else '{ abort(); }'
        out+=s[i:st]+b; i=e
    s=out+s[i:]
    s=s.replace('config.gridDim','config_gridDim').replace('config.blockDim','config_blockDim').replace('config_gridDim = blocks;','').replace('config_blockDim = threads;','').replace('return cudaLaunchKernelEx(&config, kernel, p);','return cudaSuccess;').replace('asm("createpolicy','//')
    if 'asm' in re.sub(r'//.*','',s): print(f, [l for l in s.split('\n') if 'asm' in l][:8])
    open(os.path.join(DST,f),'w').write(s)
