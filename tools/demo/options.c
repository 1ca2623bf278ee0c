/* options.c - see options.h */
#include "options.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void list(const struct option *options, const char *about)
{
	printf("%s\n\n", about);
	for (const struct option *o = options; o->name; o++) {
		if (o->kind == OPTION_NUMBER)
			printf("  --%-16s %s (default %g)\n", o->name, o->help, *(double *)o->value);
		else
			printf("  --%-16s %s\n", o->name, o->help);
	}
	exit(0);
}

static void refuse(const char *program, const char *option, const char *why)
{
	fprintf(stderr, "%s: %s: %s (see --help)\n", program, option, why);
	exit(2);
}

static void set(char **argv, int at, const struct option *option)
{
	const char *text = argv[at];
	char *end;

	if (option->kind == OPTION_TEXT) {
		*(const char **)option->value = text;
		return;
	}
	*(double *)option->value = strtod(text, &end);
	if (end == text || *end)
		refuse(argv[0], argv[at - 1], "expected a number");
}

void options_parse(int argc, char **argv, const struct option *options, const char *about)
{
	for (int i = 1; i < argc; i++) {
		const struct option *o = options;
		if (!strcmp(argv[i], "--help"))
			list(options, about);
		while (o->name && (strncmp(argv[i], "--", 2) || strcmp(argv[i] + 2, o->name)))
			o++;
		if (!o->name)
			refuse(argv[0], argv[i], "no such option");
		if (o->kind == OPTION_FLAG)
			*(int *)o->value = 1;
		else if (++i < argc)
			set(argv, i, o);
		else
			refuse(argv[0], argv[i - 1], "needs a value");
	}
}
