# Units of m64_rows_block.cuh: every key of every item belongs to one unit once, in tiles that begin at multiples of 64.
import math, random
def units_of(items, whole, parts): return whole+(items-whole)*parts
def in_parts(x, parts):
    inverse=((1<<32)+parts-1)//parts & 0xFFFFFFFF
    assert x < 1<<28 or x == 1<<28
    return x*inverse>>32
for parts in range(2,9):
    for x in list(range(5000))+[random.randrange(1<<28) for _ in range(20000)]+[(1<<28)-1-i for i in range(50)]:
        assert in_parts(x,parts)==x//parts
def keys(all_, first_source, part, parts):
    of_first=first_source; k=all_; first=0
    tiles=(max(k,1)+63)//64
    first=in_parts(tiles*part,parts)*64
    k=max(0,min(k,in_parts(tiles*(part+1),parts)*64)-first)
    of_first-=first
    out=[]
    for key in range(k):
        is_first=key<of_first
        out.append((0,key+first) if is_first else (1,key-of_first))
    return out,(max(k,1)+63)//64
for _ in range(3000):
    a,b=random.choice([0,1,63,64,65,128,random.randrange(2100)]),random.choice([0,0,1,64,512,random.randrange(1200)])
    parts=random.randint(2,8); got=[]; most=0
    for part in range(parts):
        k,t=keys(a+b,a,part,parts); got+=k; most=max(most,t)
    assert got==[(0,i) for i in range(a)]+[(1,i) for i in range(b)]
    assert most<=max(1,-(-((max(a+b,1)+63)//64)//parts))
def division(items,tiles,sms=132):
    rest=items%sms
    def time(parts):
        blocks=rest*parts
        return -(-blocks//sms)*(-(-tiles//parts)+2.5)+((1+1.5*blocks/sms) if parts>1 else 0)
    best=1
    for parts in range(2,min(8,tiles)+1):
        if time(parts)<.95*time(best): best=parts
    whole=items-rest if best>1 else items
    return whole,best,(items//sms)*(tiles+2.5)+time(best)
if __name__=='__main__':
    for heads,tl,tag in ((64,32,'656/576'),(128,32,'656/576'),(64,10,'584'),(128,18,'584')):
        for tokens in (16,24,32,48,64,96,128,133,160,200,264,300,400,512,1000,4096):
            items=tokens*heads//64
            w,p,t=division(items,tl)
            print(tag,heads,tokens,'items',items,'whole',w,'parts',p,'tile times %.1f (about %.0f us), undivided %.1f, workspace %.1f MB'%(t,t*2.62,-(-items//132)*(tl+2.5),(items-w)*p*64*515*4/2**20))
