/* The Windows program that wine runs: OpenVINO's NPU plugin and compiler, asked for one graph after the other.

   Every line of its input is MODEL.xml<tab>OUT.blob<tab>PLATFORM<tab>TILES, 0 for the compiler's own choice, which
   cannot be had again once a number was set. The plugin logs to the same output. A line that begins with
   @result ends a graph: status (0, or where it failed), seconds, and the error. A compiler that aborts ends the process. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <windows.h>

typedef void object;
static HMODULE library;

static FARPROC entry(const char *name) {
  FARPROC found = GetProcAddress(library, name);
  if (!found) {
    printf("@result\t9\t0\topenvino_c.dll has no %s\n", name);
    exit(9);
  }
  return found;
}

typedef int (*create_f)(object **);
typedef int (*read_f)(object *, const char *, const char *, object **);
typedef int (*set_f)(object *, const char *, ...);
typedef int (*compile_f)(object *, object *, const char *, size_t, object **, ...);
typedef int (*export_f)(object *, const char *);
typedef void (*free_f)(object *);
typedef const char *(*error_f)(void);
typedef int (*flush_f)(FILE *);

int main(void) {
  static char line[8192];
  setvbuf(stdout, NULL, _IONBF, 0);
  library = LoadLibraryA("openvino_c.dll");
  if (!library) {
    printf("@result\t9\t0\topenvino_c.dll cannot be loaded, Windows error %lu\n", GetLastError());
    return 9;
  }
  /* The plugin's log goes through the C runtime of Visual C++, which has buffers of its own. */
  flush_f flush = (flush_f)(void *)GetProcAddress(GetModuleHandleA("ucrtbase.dll"), "fflush");
  set_f set = (set_f)(void *)entry("ov_core_set_property");
  read_f read = (read_f)(void *)entry("ov_core_read_model");
  compile_f compile = (compile_f)(void *)entry("ov_core_compile_model");
  export_f export_blob = (export_f)(void *)entry("ov_compiled_model_export_model");
  free_f free_model = (free_f)(void *)entry("ov_model_free");
  free_f free_compiled = (free_f)(void *)entry("ov_compiled_model_free");
  error_f last_error = (error_f)(void *)entry("ov_get_last_err_msg");
  object *core = NULL;
  int status = ((create_f)(void *)entry("ov_core_create"))(&core);
  const char *options[][2] = {
      {"NPU_COMPILER_TYPE", "PLUGIN"}, {"LOG_LEVEL", "LOG_INFO"}, {"NPU_COMPILATION_MODE_PARAMS", "dump-task-stats=true"}};
  for (int at = 0; !status && at < 3; at++) status = set(core, "NPU", options[at][0], options[at][1]);
  if (status) {
    printf("@result\t9\t0\t%s\n", last_error());
    return 9;
  }
  while (fgets(line, sizeof line, stdin)) {
    line[strcspn(line, "\r\n")] = 0;
    char *model_path = strtok(line, "\t"), *blob_path = strtok(NULL, "\t"), *platform = strtok(NULL, "\t");
    char *tiles = strtok(NULL, "\t");
    if (!tiles) continue;
    object *model = NULL, *compiled = NULL;
    double seconds = 0;
    LARGE_INTEGER frequency, start, end;
    QueryPerformanceFrequency(&frequency);
    status = set(core, "NPU", "NPU_PLATFORM", platform) || (atoi(tiles) && set(core, "NPU", "NPU_TILES", tiles)) ? 1 : 0;
    if (!status) status = read(core, model_path, NULL, &model) ? 2 : 0;
    if (!status) {
      QueryPerformanceCounter(&start);
      status = compile(core, model, "NPU", 0, &compiled) ? 3 : 0;
      QueryPerformanceCounter(&end);
      seconds = (double)(end.QuadPart - start.QuadPart) / frequency.QuadPart;
    }
    if (!status) status = export_blob(compiled, blob_path) ? 4 : 0;
    char message[1024];
    strncpy(message, status ? last_error() : "", sizeof message - 1);
    message[sizeof message - 1] = 0;
    for (char *at = message; *at; at++)
      if (*at == '\n' || *at == '\r' || *at == '\t') *at = ' ';
    if (compiled) free_compiled(compiled);
    if (model) free_model(model);
    if (flush) flush(NULL);
    printf("\n@result\t%d\t%.4f\t%s\n", status, seconds, message);
  }
  /* The plugin's threads may not end under wine. */
  TerminateProcess(GetCurrentProcess(), 0);
}
