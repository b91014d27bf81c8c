// What this library was built from: hatch_build.py says so, and native/sources.py checks it.
extern "C" const char* llmjax_sources() { return LLMJAX_SOURCES; }
