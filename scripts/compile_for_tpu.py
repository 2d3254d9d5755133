"""draft"""
import importlib.util, os, sys, time
os.environ["PJRT_DEVICE"] = "CPU"
from pathlib import Path
from qat_lora.run.command_line import parse
from qat_lora.backend.recording import RecordingBackend
from qat_lora.backend.aot import *

def load(name):
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
m = load(sys.argv[1])
cfg = parse(m.Config, m.NAME, sys.argv[2:])
b = RecordingBackend("bf16", cfg.num_chips or 1)
t=time.time()
m.rehearse(cfg, b)
print("recorded", time.time()-t)
for k, v in b.graphs.items(): print(k, b.tokens[k], [(g.hash, len(g.code), len(g.donated), g.chips) for g in v])
import pickle
pickle.dump({k:[(g.code,g.donated,g.chips) for g in v] for k,v in b.graphs.items()},open("/tmp/lt/q.pkl","wb"))
