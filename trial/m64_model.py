# index maps of the new kernel: every (row, dim) of a tile lands once where wgmma reads it, by the right ratio
def swz(row, chunk): return row*128 + ((chunk ^ (row&7))<<4)
KB=8192; KT=65536
for name,kNarrow,kTailF in (('V4',448,False),('V32',512,True)):
    kTail=2*KT
    def block_at(slot,block): return slot*KT+block*KB if block<8 else kTail+slot*KB
    # ratio table: word index -> (row lo, row hi, group)
    table={}
    for warp in range(4):
        for lane in range(32):
            for k in range(2):
                table[warp*64+k*32+lane]=(warp*16+k*4+lane//8, warp*16+(k+2)*4+lane//8, lane%8)
    # A lane asks for the scale of dimensions 64 (lane % 8) on; of two terms even lanes keep the first, odd ones the second.
    terms=2 if name=='V32' else 1
    for slot in (0,1):
        where={}
        for warp in range(8):
            for lane in range(32):
                row=warp%4*2+lane//16; begin=(lane>>2^lane>>3)&1
                isn=warp//4*256+lane%16*16<kNarrow
                if not isn: continue
                part=lane%16
                ratios=row*32+warp//4*16+part//4//terms*terms*4
                assert ratios%(4*terms)==0
                fr=[row*kNarrow+warp//4*256+part*16+(begin^j)*8 for j in range(2)]
                to=[warp//4*(KT//2)+part//4*KB+swz(row,part%4*2+(begin^j)) ^ (slot*KT) for j in range(2)]
                for quarter in range(4):
                    lo,hi,g=table[(ratios+quarter*256)//4]
                    for term in range(terms): assert table[(ratios+quarter*256)//4+term]==(lo,hi,g+term) and g%terms==0
                    for k in range(4):
                        src=fr[k%2]+(quarter*16+k//2*8)*kNarrow
                        dst=to[k%2]+(quarter*16+k//2*8)*128
                        r=lo if k<2 else hi
                        for b in range(8):
                            srow,sdim=divmod(src+b,kNarrow)
                            assert srow==r and sdim//(64*terms)==g//terms,(srow,r,sdim,g)
                            a=dst+2*b
                            assert a not in where; where[a]=(srow,sdim)
        for warp in range(4):
            for lane in range(32):
                for k in range(4):
                    at=block_at(slot,kNarrow//64)+warp%4*16*128+swz(lane//8,lane%8)
                    a0=(at^(k%2*64))+k*512
                    row=warp*16+k*4+lane//8
                    for b in range(8):
                        a=a0+2*b; assert a not in where; where[a]=(row,kNarrow+lane%8*8+b)
        dims=kNarrow+64
        assert len(where)==64*dims
        for r in range(64):
            for d in range(dims):
                assert where[block_at(slot,d//64)+swz(r,d%64//8)+d%8*2]==(r,d)
    # bank conflicts of raw loads: half warps of 8 bytes
    worst=0
    for warp in range(8):
        for hw in range(2):
            for j in range(2):
                banks={}
                for lane in range(hw*16,hw*16+16):
                    isn=warp//4*256+lane%16*16<kNarrow
                    part=lane%16 if isn else 0
                    row=warp%4*2+lane//16; begin=(lane>>2^lane>>3)&1
                    ad=row*kNarrow+warp//4*256+part*16+(begin^j)*8
                    for w in (0,4):
                        banks.setdefault((ad+w)//4%32,set()).add((ad+w)//4)
                worst=max(worst,max(map(len,banks.values())))
    print(name,'ok, conflicts of raw loads',worst)
# exchange
for t0 in range(1):
    W={t:[(b,t) for b in range(4)] for t in range(4)}
    for j in (0,2):
        sent={t:(W[t][j] if t&1 else W[t][j+1]) for t in range(4)}
        for t in range(4):
            if t&1: W[t][j]=sent[t^1]
            else: W[t][j+1]=sent[t^1]
    x={t:(W[t][0] if t&2 else W[t][2]) for t in range(4)}; y={t:(W[t][1] if t&2 else W[t][3]) for t in range(4)}
    out={t:([x[t^2],y[t^2],W[t][2],W[t][3]] if t&2 else [W[t][0],W[t][1],x[t^2],y[t^2]]) for t in range(4)}
    assert out=={t:[(t,k) for k in range(4)] for t in range(4)},out
print('exchange ok')
# the merge of parts: a thread there gets what a thread of the output warpgroups has written, and puts it where it belongs
import random
def place(half,warp4,lane,j): # of o[j] of wgmma's output: head, dimension
    return warp4*16+lane//4+8*(j//2%2), half*256+j//4*8+lane%4*2+j%2
written={}
for warp in range(8):
    for lane in range(32):
        for c in range(4):
            for j in range(8):
                at=warp*32*32+lane+c*8*32+j*32 # in units of 16 bytes
                assert at not in written
                written[at]=[place(warp//4,warp%4,lane,c*32+j*4+i) for i in range(4)]
assert sorted(written)==list(range(8*1024))
outs={}
for eighth in range(8):
    for warp in range(8):
        got={}
        for lane in range(32):
            o=[]
            for b in range(4): o+=written[warp*32*32+lane+eighth*4*32+b*32]
            got[lane]=o
        for h in range(2):
            packed={lane:[(got[lane][b*4+h*2],got[lane][b*4+h*2+1]) for b in range(4)] for lane in range(32)}
            for lane in range(32): # exchanged(): lane t of four gets block t of all four
                t=lane%4; mine=[packed[lane-t+k][t] for k in range(4)]
                dims=[x for pair in mine for x in pair]
                head=warp%4*16+lane//4+h*8; column=warp//4*256+eighth*32+lane%4*8
                assert dims==[(head,column+i) for i in range(8)],(dims,head,column)
                for x in dims: assert x not in outs; outs[x]=1
assert len(outs)==64*512
print('merge ok')
