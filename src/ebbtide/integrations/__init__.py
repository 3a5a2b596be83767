"""ebbtide inside other people's training loops: one module for each library."""
