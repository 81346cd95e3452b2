import subprocess,shutil,os
M=[('no barrier in merge_halves','sparse_mla_mma.cu','sync_threads(3, kConsumerThreads);\n    if (group) return;','if (group) return;','mode=3'),
('no sync at the end of attend','sparse_mla_mma.cu','shared.row_largest[g + h * 8][warp] = largest[h];\n    }\n    sync();','shared.row_largest[g + h * 8][warp] = largest[h];\n    }','mode=3'),
('relaxed arrive before merge reads','sparse_mla_mma.cu','barrier.cluster.arrive.release.aligned','barrier.cluster.arrive.relaxed.aligned','mode=0 splits=4 w0=400 lengths=0'),
('no syncwarp in prepare_scales','mma_scores.cuh','      __syncwarp();\n','','mode=3 format=2'),
]
env=dict(os.environ,TSAN_OPTIONS="halt_on_error=1 exitcode=66 history_size=2")
for n,f,a,b,o in M:
    d='/tmp/emu5mma/tsan/mut'; shutil.rmtree(d,ignore_errors=True); shutil.copytree('/work/wt-clusters/csrc',d); s=open(f'{d}/{f}').read(); assert a in s,n; open(f'{d}/{f}','w').write(s.replace(a,b))
    print(subprocess.run(['bash','mk.sh',d,'emut_mut','/tmp/emu5mma/tsan/msrc'],capture_output=True,text=True).stdout,end='')
    r=subprocess.run(['setarch','-R','./emut_mut','100','6','nan=0']+o.split(),capture_output=True,text=True,env=env,timeout=100)
    print(n,'rc',r.returncode,[l.strip() for l in (r.stderr+r.stdout).split('\n') if 'WARNING' in l or 'SUMMARY' in l or 'FAIL' in l][:3],flush=True)
