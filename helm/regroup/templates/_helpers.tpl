{{- define "regroup.labels" -}}
app.kubernetes.io/name: regroup
app.kubernetes.io/component: operator
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "regroup.selector" -}}
app.kubernetes.io/name: regroup
app.kubernetes.io/component: operator
{{- end }}

{{- define "regroup.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{- /* Annotations of an alert, of (list . "section"): where docs/how-to/runbook.md says what to do. */}}
{{- define "regroup.runbook" -}}
{{- $section := index . 1 -}}
runbook: docs/how-to/runbook.md#{{ $section }}
{{- with (index . 0).Values.metrics.rules.runbookURL }}
runbook_url: {{ printf "%s#%s" . $section | quote }}
{{- end }}
{{- end }}

{{- /* What the operator may do where its jobs are: follow jobs (and delete those that have expired), and own their pods, Services and ConfigMaps. */}}
{{- define "regroup.jobRules" -}}
- apiGroups: [regroup.dev]
  resources: [distributedtrainingjobs]
  verbs: [get, list, watch, delete]  # delete: spec.runPolicy.ttlSecondsAfterFinished
- apiGroups: [regroup.dev]
  resources: [distributedtrainingjobs/status]
  verbs: [update]
# Without it an ownerReference with blockOwnerDeletion is refused where that admission is on.
- apiGroups: [regroup.dev]
  resources: [distributedtrainingjobs/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [services, configmaps]
  verbs: [get, list, watch, create, patch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end }}
