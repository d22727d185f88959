"""Static decoder blocks for OpenVINO: everything of a layer but its attention."""
