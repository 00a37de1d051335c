import sys

from diptych.bench.cli import main

sys.exit(main(sys.argv[1:]))
