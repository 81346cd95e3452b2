import sys, numpy as np
def load(f): return np.load(f).view(np.uint32).reshape(4,4,8192,2)
for f in sys.argv[1:]:
    a=load(f)
    print("==",f)
    for role,name in ((2,"scores"),(0,"out0"),(3,"fetch")):
        # pairs of consecutive tags
        tot={}; n={}
        for b in range(4):
            r=a[b,role]; k=np.count_nonzero(r[:,0]); r=r[:k]
            if k<10: continue
            span=int(r[-1,1]-r[0,1]) & 0xffffffff
            d=(r[1:,1]-r[:-1,1]).astype(np.int64)&0xffffffff
            for (x,y,z) in zip(r[:-1,0],r[1:,0],d):
                tot[(x,y)]=tot.get((x,y),0)+z; n[(x,y)]=n.get((x,y),0)+1
        if not n: continue
        print(" ",name,"span",span,"records",k)
        S=sum(tot.values())
        for key in sorted(tot):
            print(f"    {key[0]:3}->{key[1]:3} n {n[key]//4:5} mean {tot[key]/n[key]:8.0f}  share {100*tot[key]/S:5.1f}%")
