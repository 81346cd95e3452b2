import random,subprocess,sys,time
random.seed(int(sys.argv[1])); end=time.time()+float(sys.argv[2]); exe=sys.argv[3] if len(sys.argv)>3 else './emu'
n=0;worst={2:[0,0],3:[0,0]}
while time.time()<end:
    f=random.choice([2,3]); splits=random.choice([1,1,1,2,3,5,8]); tokens=random.choice([1,2,3,5,7,9]) if splits==1 else random.choice([1,2])
    heads=random.choice([random.randint(17,32),random.randint(33,128)]); w0=random.choice([1,16,63,64,65,128,129,200,260,400,640,1000]); w1=random.choice([0,0,1,30,64,100,300])
    sms=random.choice([1,2,3]) ; lm=random.choice([0,1,1,2,3]); spread=random.choice([0,0,10,60]); bm=random.choice([1,30,100,1000]); 
    slow=[random.choice([1,1,1,5,30]) for _ in range(4)]; garbage=random.choice([0,0,2,10])
    a=[f,tokens,heads,w0,w1,splits,sms,random.choice([0,1,2]),random.choice([0,1,2]),random.randint(1,10**6),*slow,lm,spread,bm,random.choice([0,1]),garbage]
    try: r=subprocess.run([exe,*map(str,a)],capture_output=True,text=True,timeout=200)
    except subprocess.TimeoutExpired: print('TIMEOUT',a); continue
    n+=1
    if r.returncode or 'left' in r.stdout or 'not waited' in r.stdout: print('FAIL',' '.join(map(str,a)),'\n',r.stdout[-900:],r.stderr[-300:],flush=True)
    else:
        import re
        ex=float(re.search(r'excess ([\d.e+-]+|nan)',r.stdout).group(1)); l=float(re.search(r'lse ([\d.e+-]+)',r.stdout).group(1))
        worst[f][0]=max(worst[f][0],ex); worst[f][1]=max(worst[f][1],l)
print(n,'runs',worst)
