/*
 * module.c - images and the functions in them. "// valve-emu" text offers the built-in kernels (and those of a shared
 * object, native.h); PTX offers the names of its entries; a cubin or fatbin every name that occurs in it. What the
 * emulator cannot run is launched as a timed no-op.
 */
#include "kernel.h"

#include <ctype.h>
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define OWN_TEXT      "// valve-emu"
#define NATIVE_LINE   "// native "
#define FATBIN_MAGIC  0xba55ed50u
#define FATBINC_MAGIC 0x466243b1u

HANDLE(module_from, const void *, struct module, MAGIC_MODULE)
HANDLE(function_from, const void *, struct function, MAGIC_FUNCTION)

/* Images come without a length; each kind tells its own. 0: none of the kinds that are known. */
static size_t image_bytes(const void **image)
{
	const struct {
		uint32_t magic, version;
		const void *data;
	} *wrapper = *image;

	if (wrapper->magic == FATBINC_MAGIC)
		*image = wrapper->data;
	const struct {
		uint32_t magic;
		uint16_t version, header;
		uint64_t bytes;
	} *fatbin = *image;
	if (fatbin->magic == FATBIN_MAGIC)
		return fatbin->header + fatbin->bytes;
	const Elf64_Ehdr *elf = *image;
	if (!memcmp(elf->e_ident, ELFMAG, SELFMAG)) {
		size_t sections = elf->e_shoff + (size_t)elf->e_shentsize * elf->e_shnum;
		size_t segments = elf->e_phoff + (size_t)elf->e_phentsize * elf->e_phnum;
		return sections > segments ? sections : segments;
	}
	const char *text = *image;
	if (!strncmp(text, OWN_TEXT, sizeof(OWN_TEXT) - 1) || strstr(text, ".version"))
		return strlen(text) + 1;
	return 0;
}

static CUresult open_native(struct module *module)
{
	const char *line = strstr(module->image, NATIVE_LINE);
	char path[4096];

	if (!line)
		return CUDA_SUCCESS;
	line += sizeof(NATIVE_LINE) - 1;
	snprintf(path, sizeof(path), "%.*s", (int)strcspn(line, "\r\n"), line);
	module->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	return module->library ? CUDA_SUCCESS : CUDA_ERROR_SHARED_OBJECT_INIT_FAILED;
}

static CUresult load(const void *image, struct module **out)
{
	TRY(driver_check());
	REFUSE_IF(!image || !out, CUDA_ERROR_INVALID_VALUE);
	size_t bytes = image_bytes(&image);
	REFUSE_IF(!bytes, CUDA_ERROR_INVALID_IMAGE);
	struct module *module = calloc(1, sizeof(*module));
	if (module)
		module->image = malloc(bytes + 1);
	if (!module || !module->image) {
		free(module);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	memcpy(module->image, image, bytes);
	module->image[bytes] = 0;
	module->bytes = bytes;
	module->magic = MAGIC_MODULE;
	module->has_builtins = !strncmp(module->image, OWN_TEXT, sizeof(OWN_TEXT) - 1);
	CUresult result = module->has_builtins ? open_native(module) : CUDA_SUCCESS;
	if (result) {
		free(module->image);
		free(module);
		return result;
	}
	*out = module;
	return CUDA_SUCCESS;
}

static CUresult load_file(const char *path, struct module **out)
{
	struct stat info;
	int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;

	REFUSE_IF(fd < 0, CUDA_ERROR_FILE_NOT_FOUND);
	char *bytes = fstat(fd, &info) ? NULL : calloc(1, (size_t)info.st_size + sizeof(Elf64_Ehdr));
	ssize_t got = bytes ? read(fd, bytes, (size_t)info.st_size) : -1;
	close(fd);
	CUresult result = got < 0 ? CUDA_ERROR_OPERATING_SYSTEM : load(bytes, out);
	free(bytes);
	return result;
}

static void unload(struct module *module)
{
	/* Functions stay: launches in flight point at them, and a dangling handle must be found out by its magic. */
	for (struct function *f = module->functions; f; f = f->next)
		f->magic = 0;
	module->magic = 0;
	free(module->image);
	module->image = NULL;
}

static bool is_ptx(const struct module *module)
{
	return !module->has_builtins && isprint((unsigned char)module->image[0]);
}

/* In PTX a kernel is ".entry NAME"; elsewhere it is enough that the name occurs. */
static bool has_name(const struct module *module, const char *name)
{
	size_t length = strlen(name);

	if (!is_ptx(module))
		return memmem(module->image, module->bytes, name, length) != NULL;
	for (const char *at = strstr(module->image, ".entry"); at; at = strstr(at, ".entry")) {
		at += sizeof(".entry") - 1;
		at += strspn(at, " \t\r\n");
		if (!strncmp(at, name, length) && !isalnum((unsigned char)at[length]) &&
		    !strchr("_$", at[length]))
			return true;
	}
	return false;
}

static const struct emu_native *find_native(const struct module *module, const char *name)
{
	char symbol[256];

	if (!module->library)
		return NULL;
	snprintf(symbol, sizeof(symbol), "emu_native_%s", name);
	const struct emu_native *native = dlsym(module->library, symbol);
	return native && native->abi == EMU_NATIVE_ABI ? native : NULL;
}

static CUresult get_function(struct module *module, const char *name, struct function **out)
{
	static const int defaults[FUNCTION_ATTRIBUTES] = {1024, 0, 0, 0, 32, 90, 90, 0, 49152, -1};

	REFUSE_IF(!module, CUDA_ERROR_INVALID_HANDLE);
	REFUSE_IF(!name || !*name || !out, CUDA_ERROR_INVALID_VALUE);
	const struct builtin *builtin = module->has_builtins ? builtin_find(name) : NULL;
	const struct emu_native *native = builtin ? NULL : find_native(module, name);
	REFUSE_IF(!builtin && !native && (module->has_builtins || !has_name(module, name)),
	          CUDA_ERROR_NOT_FOUND);
	pthread_mutex_lock(&emu.lock);
	struct function *function = module->functions;
	while (function && strcmp(function->name, name))
		function = function->next;
	if (!function) {
		function = zeroed(sizeof(*function) + strlen(name) + 1);
		function->magic = MAGIC_FUNCTION;
		function->module = module;
		function->builtin = builtin;
		function->native = native;
		memcpy(function->attributes, defaults, sizeof(defaults));
		strcpy(function->name, name);
		function->next = module->functions;
		module->functions = function;
	}
	pthread_mutex_unlock(&emu.lock);
	*out = function;
	return CUDA_SUCCESS;
}

CUAPI(2000, cuModuleLoadData, CUmodule *out, const void *image)
{
	struct context *ctx;
	CUresult result = context_current(&ctx);

	return result ? result : load(image, (struct module **)out);
}

CUAPI(2010, cuModuleLoadDataEx, CUmodule *out, const void *image, unsigned count, void *options,
      void **values)
{
	(void)count, (void)options, (void)values;
	return cuModuleLoadData(out, image);
}

CUAPI(2000, cuModuleLoadFatBinary, CUmodule *out, const void *image)
{
	return cuModuleLoadData(out, image);
}

CUAPI(2000, cuModuleLoad, CUmodule *out, const char *path)
{
	struct context *ctx;
	CUresult result = context_current(&ctx);

	return result ? result : load_file(path, (struct module **)out);
}

CUAPI(2000, cuModuleUnload, CUmodule handle)
{
	struct module *module = module_from(handle);

	REFUSE_IF(!module, CUDA_ERROR_INVALID_HANDLE);
	unload(module);
	return CUDA_SUCCESS;
}

CUAPI(2000, cuModuleGetFunction, CUfunction *out, CUmodule handle, const char *name)
{
	return get_function(module_from(handle), name, (struct function **)out);
}

CUAPI(12000, cuLibraryLoadData, CUlibrary *out, const void *image, void *jit, void **jit_values,
      unsigned jit_count, void *options, void **values, unsigned count)
{
	(void)jit, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
	return load(image, (struct module **)out);
}

CUAPI(12000, cuLibraryLoadFromFile, CUlibrary *out, const char *path, void *jit, void **jit_values,
      unsigned jit_count, void *options, void **values, unsigned count)
{
	(void)jit, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
	return load_file(path, (struct module **)out);
}

CUAPI(12000, cuLibraryUnload, CUlibrary handle)
{
	return cuModuleUnload((CUmodule)(void *)handle);
}

CUAPI(12000, cuLibraryGetKernel, CUkernel *out, CUlibrary handle, const char *name)
{
	return get_function(module_from(handle), name, (struct function **)out);
}

CUAPI(12000, cuLibraryGetModule, CUmodule *out, CUlibrary handle)
{
	*out = (CUmodule)module_from(handle);
	return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUAPI(12000, cuKernelGetFunction, CUfunction *out, CUkernel handle)
{
	*out = (CUfunction)function_from(handle);
	return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
