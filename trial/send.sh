D=/work/main/.dev/m64; rm -rf $D/repo* $D/lib*.so $D/__pycache__
for v in "$@"; do cp -r /tmp/g_$v $D/repo_$v; cp /tmp/g_$v.so $D/lib_$v.so; done
cp /work/keep/trial/sanit.py /work/keep/trial/m64_check.py $D/; rm -f $D/go*.sh; cp /work/keep/trial/go*.sh $D/
du -sh $D; ls $D
