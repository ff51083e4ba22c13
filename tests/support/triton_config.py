"""Print a config.pbtxt as JSON, parsed by Triton's schema, in an environment of its own:
tritonclient[grpc].
"""

import json
import sys
from pathlib import Path

from google.protobuf import json_format, text_format  # type: ignore[import-untyped]
from tritonclient.grpc import model_config_pb2  # type: ignore[import-not-found]

message = model_config_pb2.ModelConfig()
text_format.Parse(Path(sys.argv[1]).read_text(), message)
print(json.dumps(json_format.MessageToDict(message, preserving_proto_field_name=True)))
