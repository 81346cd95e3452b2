import re,subprocess,sys
