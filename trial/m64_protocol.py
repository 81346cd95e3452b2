# barrier protocol of the new kernel as coroutines in random order; data is tagged with what it should be
import random,sys
class Bar:
    def __init__(s,n): s.n=n; s.left=n; s.phase=0
    def arrive(s,k=1):
        s.left-=k; assert s.left>=0,'too many arrivals'
        if s.left==0: s.phase+=1; s.left=s.n
    def done(s,parity): # try_wait.parity: phase with that parity completed
        return (s.phase&1)!=parity
def run(kind,items,seed):
    rnd=random.Random(seed)
    packed=kind!='bf16'; tail=kind=='v32'
    full=[Bar(2*1+ (4 if packed else 0)) if packed else Bar(4) for _ in range(2)]
    raw_full=[Bar(1) for _ in range(4)]; raw_empty=[Bar(2) for _ in range(4)]
    empty=[[Bar(2) for _ in range(4)] for _ in range(2)]
    q_full=Bar(4); q_read=Bar(1); ready=[Bar(1),Bar(1)]; used=[Bar(2),Bar(2)]; tail_empty=[Bar(1),Bar(1)]
    slot=[[[None]*2 for _ in range(4)] for _ in range(2)]   # slot, quarter, half: content tag
    wide=[[None]*4,[None]*4]; raw=[None]*4; ratio=[None]*4; powers=[[None]*4 for _ in range(4)]; kindm=[None]*4
    weights=[None,None]; maxi=[None,None]; factor=[None,None]; stag=[None]*4
    outputs=[]
    def wait(b,par):
        while not b.done(par): yield
    def producer(q):
        entry=0; waiting=None
        def announce(k,tag):
            nonlocal waiting
            if packed:
                yield from wait(raw_empty[q],entry&1^1)
                if waiting is not None:
                    wide[entry-1&1][q]=waiting; full[entry-1&1].arrive(); waiting=None
                if q==0: kindm[entry%4]=k
            else: powers[entry%4][q]=tag
        for it,tiles in enumerate(items):
            yield from announce('q',None)
            if packed:
                raw_full[q].arrive(); yield
                yield from wait(raw_empty[q],entry&1)
            else: yield from wait(empty[entry&1][q],entry//2&1)
            for h in range(2): slot[entry&1][q][h]=('q',it)
            wide[entry&1][q]=('q',it)
            yield
            q_full.arrive(); entry+=1
            for t in range(tiles):
                tag=(it,t)
                yield from announce('k',tag)
                if packed:
                    yield
                    raw[q]=tag; ratio[q]=tag; powers[entry%4][q]=tag
                    raw_full[q].arrive(); yield
                    if tail:
                        yield from wait(tail_empty[entry&1],entry//2&1^1)
                        wide[entry&1][q]=tag; full[entry&1].arrive()
                    else: waiting=tag
                else:
                    yield from wait(empty[entry&1][q],entry//2&1)
                    for h in range(2): slot[entry&1][q][h]=tag
                    wide[entry&1][q]=tag
                    yield
                    full[entry&1].arrive()
                entry+=1
                yield
        if packed:
            yield from announce('end',None); raw_full[q].arrive()
    def score():
        entry=tile=odd=0; phases=[0,0]
        for it,tiles in enumerate(items):
            yield from wait(q_full,odd)
            for _ in range(2):
                for q in range(4):
                    assert slot[entry&1][q]==[('q',it)]*2 and wide[entry&1][q]==('q',it),'q'
                yield
            q_read.arrive()
            if tail: tail_empty[entry&1].arrive()
            entry+=1
            for t in range(tiles):
                s=entry&1
                yield from wait(full[s],phases[s]); phases[s]^=1
                for _ in range(3):
                    for q in range(4):
                        assert slot[s][q]==[(it,t)]*2,('score slot',slot[s][q],(it,t)); assert wide[s][q]==(it,t),'score wide'
                        assert powers[entry%4][q]==(it,t),'powers'
                    yield
                if tail: tail_empty[s].arrive()
                yield
                for q in range(4): assert powers[entry%4][q]==(it,t),'powers2'
                b=tile%2
                yield from wait(used[b],tile//2&1^1)
                maxi[b]=(it,t); weights[b]=(it,t); yield
                for q in range(4): assert powers[entry%4][q]==(it,t),'powers3'
                if t==tiles-1: factor[odd]=it
                ready[b].arrive(); tile+=1; entry+=1
            odd^=1
    def values(half):
        tile=odd=entry=0; st={'e':0,'k':None,'rows':None}
        def take(q):
            if packed:
                yield from wait(raw_full[q],st['e']&1)
                if q==0: st['k']=kindm[st['e']%4]
                st['rows']=(raw[q],ratio[q])
        def put(q):
            s=st['e']&1
            if not packed:
                empty[s][q].arrive()
                if q==3: st['e']+=1
                return
            if st['k']=='end': return
            if st['k']=='k':
                assert (raw[q],ratio[q])==st['rows'] and raw[q]==ratio[q]
                slot[s][q][half]=raw[q]
                if q==3: full[s].arrive()
            raw_empty[q].arrive()
            if q==3: st['e']+=1
        def both():
            for q in range(4):
                yield from take(q); put(q); yield
        yield from both(); yield from both()
        started=False
        for it,tiles in enumerate(items):
            if not started:
                yield from wait(q_read,odd); yield from both()
            entry+=1
            for t in range(tiles):
                b=tile%2
                yield from wait(ready[b],tile//2&1)
                assert maxi[b]==(it,t)
                for step in range(4):
                    if step>0:
                        # products of step-1 finish now: they read until here
                        assert slot[entry&1][step-1][half]==(it,t) and weights[b]==(it,t),'pv'
                        if kind=='v4' and half==1: assert wide[entry&1][step-1]==(it,t),'pv wide'
                        put(step-1)
                    yield
                    yield from take(step)
                    yield
                assert slot[entry&1][3][half]==(it,t) and weights[b]==(it,t)
                if kind=='v4' and half==1: assert wide[entry&1][3]==(it,t),'pv wide'
                used[b].arrive(); put(3); tile+=1; entry+=1
                yield
            assert factor[odd]==it,'factor'
            odd^=1
            for c in range(4):
                if packed and c==2:
                    started=st['k']!='end'
                    if started:
                        yield from wait(q_read,odd)
                        for q in (0,1): yield from take(q); put(q); yield
                if packed and c==3 and started:
                    for q in (2,3): yield from take(q); put(q); yield
                yield
            outputs.append((it,half))
    agents=[producer(q) for q in range(4)]+[score(),values(0),values(1)]
    speeds=[rnd.random()**2+.02 for _ in agents]
    live=list(range(7)); idle=0; steps=0
    while live:
        a=rnd.choices(live,[speeds[i] for i in live])[0]
        try: next(agents[a])
        except StopIteration: live.remove(a)
        steps+=1
        if steps>200000: raise Exception(('deadlock',kind,items,seed,live))
    assert sorted(outputs)==[(i,h) for i in range(len(items)) for h in range(2)]
n=0
for seed in range(400):
    r=random.Random(seed*7+1)
    for kind in('v4','v32','bf16'):
        items=[r.choice([1,1,2,3,4,5]) for _ in range(r.randint(1,6))]
        run(kind,items,seed); n+=1
print('protocol ok',n)
