{{/* One install per cluster: CRDs, webhooks and the scheduler's name are cluster-wide, so names are fixed. */}}

{{- define "valve.labels" -}}
app.kubernetes.io/name: valve
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* Usage: include "valve.selector" (dict "root" . "component" "scheduler") */}}
{{- define "valve.selector" -}}
app.kubernetes.io/name: valve
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* Usage: include "valve.image" (dict "root" . "image" .Values.image "tag" DEFAULT) */}}
{{- define "valve.image" -}}
{{- $repository := .image.repository -}}
{{- with .root.Values.global.imageRegistry -}}
{{- $repository = printf "%s/%s" (trimSuffix "/" .) (regexReplaceAll "^[^/]*[.:][^/]*/" $repository "") -}}
{{- end -}}
{{- if .image.digest -}}{{ $repository }}@{{ .image.digest }}
{{- else -}}{{ $repository }}:{{ .image.tag | default .tag }}
{{- end -}}
{{- end }}

{{- define "valve.ownImage" -}}
{{ include "valve.image" (dict "root" . "image" .Values.image "tag" .Chart.AppVersion) }}
{{- end }}

{{/* The scheduler must fit the API server: same version unless told otherwise. */}}
{{- define "valve.kubeSchedulerImage" -}}
{{- $version := regexFind "^v[0-9]+\\.[0-9]+\\.[0-9]+" .Capabilities.KubeVersion.Version -}}
{{ include "valve.image" (dict "root" . "image" .Values.scheduler.kubeScheduler "tag" $version) }}
{{- end }}

{{- define "valve.pod" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "valve.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "valve.environment" -}}
- {name: VALVE_DOMAIN, value: {{ .Values.domain | quote }}}
- {name: VALVE_ONLINE_RESOURCES, value: {{ join "," .Values.admission.online.resources | quote }}}
- {name: OPENBLAS_NUM_THREADS, value: "1"}
- name: POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
{{- end }}

{{/* Probes and metrics of every process of valve-scheduler. */}}
{{- define "valve.probes" -}}
ports:
- {name: metrics, containerPort: 8902}
livenessProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 10
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 5
{{- end }}

{{/* Where a component's pods may run. Usage: (dict "root" . "component" "scheduler" "placement" MAP "priority" DEFAULT) */}}
{{- define "valve.placement" -}}
{{- with .placement.priorityClassName | default .priority }}
priorityClassName: {{ . }}
{{- end }}
{{- with .placement.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .placement.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .placement.affinity }}
affinity: {{- toYaml .placement.affinity | nindent 2 }}
{{- else }}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels: {{- include "valve.selector" . | nindent 12 }}
{{- end }}
{{- end }}

{{/* A Deployment up to where its containers begin. Usage: (dict "root" . "component" "scheduler" "of" .Values.scheduler
"priority" DEFAULT), and "annotations" of its pods where they have any */}}
{{- define "valve.deployment" -}}
{{- $selector := include "valve.selector" . }}
{{- $placement := dict "root" .root "component" .component "placement" .of.placement "priority" .priority -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: valve-{{ .component }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "valve.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
spec:
  replicas: {{ .of.replicas }}
  selector:
    matchLabels: {{- $selector | nindent 6 }}
  template:
    metadata:
      labels: {{- $selector | nindent 8 }}
      {{- with .annotations }}
      annotations: {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      serviceAccountName: valve-{{ .component }}
      {{- include "valve.pod" .root | nindent 6 }}
      {{- include "valve.placement" $placement | nindent 6 }}
{{- end }}

{{/* One of several replicas stays. Usage: (dict "root" . "component" "scheduler" "replicas" NUMBER) */}}
{{- define "valve.budget" -}}
{{- if gt (int .replicas) 1 }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: valve-{{ .component }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "valve.labels" .root | nindent 4 }}
spec:
  minAvailable: 1
  selector:
    matchLabels: {{- include "valve.selector" . | nindent 6 }}
{{- end }}
{{- end }}

{{/* Which namespaces are opted in to injection. */}}
{{- define "valve.optIn" -}}
{{- toYaml (.Values.admission.online.namespaceLabel | default (dict (printf "%s/inject" .Values.domain) "enabled")) }}
{{- end }}

{{/* Where Go's collector begins to work harder: nine tenths of a memory limit (Mi or Gi), in MiB. Empty for others. */}}
{{- define "valve.goMemoryLimit" -}}
{{- $limit := toString (dig "limits" "memory" "" .) }}
{{- if hasSuffix "Gi" $limit }}
{{- printf "%dMiB" (mulf (float64 (trimSuffix "Gi" $limit)) 921.6 | int) }}
{{- else if hasSuffix "Mi" $limit }}
{{- printf "%dMiB" (mulf (float64 (trimSuffix "Mi" $limit)) 0.9 | int) }}
{{- end }}
{{- end }}

{{/* CEL: the pod says what work it is, by label or annotation. Usage: (dict "root" . "role" "online") */}}
{{- define "valve.says" -}}
{{- $key := printf "%s/role" .root.Values.domain | squote -}}
((has(object.metadata.labels) && {{ $key }} in object.metadata.labels && object.metadata.labels[{{ $key }}] == {{ squote .role }}) || (has(object.metadata.annotations) && {{ $key }} in object.metadata.annotations && object.metadata.annotations[{{ $key }}] == {{ squote .role }}))
{{- end }}

{{/* CEL: container c asks for GPUs as online pods do, by a resource or by a claim. What a claim is for is not known before it
is allocated, so it counts for pods that say what they are; the shim does nothing in a process without CUDA. */}}
{{- define "valve.asksForGpus" -}}
{{- $names := list }}
{{- range .Values.admission.online.resources }}{{- if contains "/" . }}{{- $names = append $names (squote .) }}{{- end }}{{- end -}}
(has(c.resources) && ((has(c.resources.limits) && [{{ join ", " $names }}].exists(r, r in c.resources.limits)) || (has(c.resources.claims) && c.resources.claims.size() > 0{{ if .Values.admission.online.allGpuPods }} && {{ include "valve.says" (dict "root" . "role" "online") }}{{ end }})))
{{- end }}

{{/* An account to run under. Usage: (dict "root" . "name" NAME), and where it differs "namespace" and "annotations" */}}
{{- define "valve.account" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ .name }}
  namespace: {{ .namespace | default .root.Release.Namespace }}
  labels: {{- include "valve.labels" .root | nindent 4 }}
  {{- with .annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* Gives an account a role. Usage: (dict "root" . "kind" "ClusterRole" "name" NAME); role and account are called so too, unless
told as "role" and "account". "namespace" is where a Role counts, "accountNamespace" where the account is: default Valve's own. */}}
{{- define "valve.binding" -}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ .kind }}Binding
metadata:
  name: {{ .name }}
  {{- if eq .kind "Role" }}
  namespace: {{ .namespace | default .root.Release.Namespace }}
  {{- end }}
  labels: {{- include "valve.labels" .root | nindent 4 }}
  {{- with .annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: {{ .kind }}, name: {{ .role | default .name }}}
subjects:
- {kind: ServiceAccount, name: {{ .account | default .name }}, namespace: {{ .accountNamespace | default .root.Release.Namespace }}}
{{- end }}

{{/* What a ValidatingAdmissionPolicy finds wrong is refused. Usage: (dict "root" . "policy" NAME) */}}
{{- define "valve.denied" -}}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: {{ .policy }}
  labels: {{- include "valve.labels" .root | nindent 4 }}
spec:
  policyName: {{ .policy }}
  validationActions: [Deny]
{{- end }}
