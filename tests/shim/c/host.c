/* host.c - loads the library named on its command line and runs its run(7), if it has one. */
#include <dlfcn.h>
#include <stdio.h>

int main(int argc, char **argv)
{
	void *library = argc > 1 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : NULL;
	int (*run)(int);

	if (!library) {
		printf("not loaded: %s\n", dlerror());
		return 1;
	}
	run = (int (*)(int))dlsym(library, "run");
	if (!run) {
		printf("loaded\n");
		return 0;
	}
	return run(7);
}
