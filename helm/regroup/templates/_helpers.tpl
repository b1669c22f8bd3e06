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
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
