"""One host's processes, as `remote.RemoteHost` starts them."""

import sys

from megatron_coca.training.launch.remote import main

sys.exit(main())
